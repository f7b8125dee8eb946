"""The part of a stored weight that each tensor-parallel rank has, and CloverLM's projection of q, k
and v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)

EVERYTHING = slice(None)


@dataclass(frozen=True)
class Heads:
    """The heads of one rank.

    queries: query heads; stored: the key and value heads that they need; groups: for each group of
    queries, the index of its key head in `stored`. vLLM's attention needs groups of equal size.
    With 7 key heads on 2 or 4 ranks, a rank's queries begin or end within a group. So its groups
    are halves (TP 2) or single queries (TP 4), and several groups share a key head.
    """

    queries: range
    stored: range
    groups: tuple[int, ...]

    @property
    def is_plain(self) -> bool:
        """Whether every stored head has exactly one group."""
        return len(self.groups) == len(self.stored)


def heads_of_rank(query_heads: int, key_heads: int, rank: int, ranks: int) -> Heads:
    """The heads of `rank`. Query h attends to key head h // (query_heads / key_heads).

    Raises ValueError if the numbers of heads do not divide.
    """
    if query_heads % ranks or query_heads % key_heads:
        raise ValueError(
            f"{query_heads} query heads and {key_heads} key heads cannot be shared by {ranks}"
            " tensor-parallel ranks"
        )
    ratio, count = query_heads // key_heads, query_heads // ranks
    queries = range(rank * count, (rank + 1) * count)
    size = next(n for n in range(ratio, 0, -1) if ratio % n == 0 and count % n == 0)
    keys = [head // ratio for head in queries[::size]]
    return Heads(queries, range(keys[0], keys[-1] + 1), tuple(key - keys[0] for key in keys))


class HeadProjection(ReplicatedLinear):
    """q, k and v of one rank's heads in one product.

    vLLM's QKVParallelLinear cannot split 7 key heads over 2 ranks.
    """

    def __init__(self, hidden_size: int, head_dim: int, heads: Heads, **kwargs: Any) -> None:
        query = slice(heads.queries.start * head_dim, heads.queries.stop * head_dim)
        key = slice(heads.stored.start * head_dim, heads.stored.stop * head_dim)
        self.stored_rows = (query, key, key)
        self.output_sizes = [rows.stop - rows.start for rows in self.stored_rows]
        super().__init__(
            hidden_size, sum(self.output_sizes), bias=False, return_bias=False, **kwargs
        )

    def weight_loader(
        self, param: torch.nn.Parameter, loaded_weight: Tensor, part: int = 0
    ) -> None:
        """Load this rank's rows of q (part 0), k (1) or v (2) of an unquantized checkpoint."""
        param.data.split(self.output_sizes)[part].copy_(loaded_weight[self.stored_rows[part]])


def stored_part(layer: torch.nn.Module, part: int) -> tuple[slice, slice]:
    """This rank's (rows, columns) of the stored weight [N, K] of a layer's `part`."""
    if isinstance(layer, HeadProjection):
        return layer.stored_rows[part], EVERYTHING
    if isinstance(layer, RowParallelLinear):
        columns = layer.input_size_per_partition
        return EVERYTHING, slice(layer.tp_rank * columns, (layer.tp_rank + 1) * columns)
    if isinstance(layer, ColumnParallelLinear):
        rows = layer.output_size_per_partition
        return slice(layer.tp_rank * rows, (layer.tp_rank + 1) * rows), EVERYTHING
    return EVERYTHING, EVERYTHING

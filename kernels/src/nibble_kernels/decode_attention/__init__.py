"""nibble::decode_attention: attention of a few query tokens a sequence over vLLM's paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nibble_kernels.decode_attention.reference import attend
from nibble_kernels.library import operator

__all__ = ["Workspace", "decode_attention", "make_workspace"]

# Of problem.h: rows of a product, sequences of a launch, blocks of a cluster.
ROWS, SEQUENCES, RANKS = 16, 256, 8
# Tokens of a split of a short sequence, the most splits, and the most sequences of a batch that
# clusters of blocks compute (docs/kernels/decode_attention.md).
LEAST_CHUNK, MOST_SPLITS, MOST_CLUSTERED = 128, 64, 2


@dataclass(frozen=True)
class Workspace:
    """What the kernel keeps between its blocks. The counters are zero before and after a call."""

    partials: Tensor
    counters: Tensor
    least_chunk: int = LEAST_CHUNK
    most_splits: int = MOST_SPLITS
    most_clustered: int = MOST_CLUSTERED
    warpgroups: bool = True


def make_workspace(
    sequences: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    *,
    most_queries: int = 1,
    device: torch.device | str = "cuda",
    least_chunk: int = LEAST_CHUNK,
    most_splits: int = MOST_SPLITS,
    most_clustered: int = MOST_CLUSTERED,
    warpgroups: bool = True,
) -> Workspace:
    """For `sequences` at a time: a larger batch takes several launches. Calls on several streams
    need one each. The last four are for tests and measurements.
    """
    items = min(sequences, SEQUENCES) * kv_heads * -(-group * most_queries // ROWS)
    rows = min(ROWS, group * most_queries)
    floats = items * most_splits * (rows * head_dim + -(-2 * rows // 4) * 4)
    return Workspace(
        torch.empty(floats, dtype=torch.float32, device=device),
        torch.zeros(items * ROWS * RANKS, dtype=torch.int32, device=device),
        least_chunk,
        most_splits,
        most_clustered,
        warpgroups,
    )


def _reference(
    query: Tensor,
    cache: Tensor,
    pages: Tensor,
    lengths: Tensor,
    query_begins: Tensor,
    most_queries: int,
    scale: float,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    window: int,
    soft_cap: float,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    *rest: object,
) -> None:
    result, sums = attend(
        query,
        cache,
        pages,
        lengths,
        query_begins,
        scale=scale,
        k_scale=k_scale,
        v_scale=v_scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
    )
    out.copy_(result)
    if lse is not None:
        lse.copy_(sums)


def _fake(*arguments: object) -> None:
    return None


_attend = operator(
    "decode_attention(Tensor query, Tensor cache, Tensor pages, Tensor lengths, Tensor"
    " query_begins, int most_queries, float scale, Tensor? k_scale, Tensor? v_scale, int window,"
    " float soft_cap, Tensor? sinks, Tensor(a!) out, Tensor(b!)? lse, Tensor(c!) partials,"
    " Tensor(d!) counters, int least_chunk, int most_splits, int most_clustered, bool"
    " warpgroups, bool early) -> ()",
    _reference,
    _fake,
)


def decode_attention(
    query: Tensor,
    cache: Tensor,
    pages: Tensor,
    lengths: Tensor,
    query_begins: Tensor,
    workspace: Workspace,
    *,
    most_queries: int = 1,
    scale: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """Attention of `query` [tokens, heads, D] over `cache` [pages, KV heads, tokens, 2 D] of any
    strides, in bfloat16 or float8_e4m3fn (times `k_scale` and `v_scale`).

    `lengths` counts a sequence's tokens with the query tokens `query_begins[i]` to
    `query_begins[i + 1]`, which are its last ones; 0 is a padded row with the result 0. `window`
    counts the tokens that a query sees, itself included; 0 means all. `lse` [tokens, heads] gets
    the logarithm of the sum of weights, a sink included. A sequence's result depends on the rest
    of the batch only in how many sequences that has, padded rows included: more than MOST_CLUSTERED
    or not, and up to 1, 2, 4, 8, … where warpgroups compute (warpgroups/form.h). The first call
    with few and with more sequences on a device must not be captured in a CUDA graph.

    `early`: the kernel before this one writes nothing that this one reads but `query` and the keys
    and values of query tokens, and all else was written before that kernel began. Lengths, page
    tables and older tokens are then read while it runs.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    _attend(
        query,
        cache,
        pages,
        lengths,
        query_begins,
        most_queries,
        scale,
        k_scale,
        v_scale,
        window,
        soft_cap,
        sinks,
        out,
        lse,
        workspace.partials,
        workspace.counters,
        workspace.least_chunk,
        workspace.most_splits,
        workspace.most_clustered,
        workspace.warpgroups,
        early,
    )
    return out

"""nibble::bf16_leading: the largest products of a few rows with a large bfloat16 weight.

A head's largest logits are all that greedy requests and top-k need. The weight's copy in eight bits
gives every product within a bound that is known. Only products that may be among the largest are
then computed from the weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nibble_kernels.library import operator

__all__ = ["Sketch", "bf16_leading", "sketch_of"]

_CODES = 127
_ROWS_AT_ONCE = 4096


class Sketch(NamedTuple):
    """A weight [N, K] in eight bits."""

    codes: Tensor  # int8 [N, K]
    measures: Tensor  # float32 [3, N]: scales, norms of weight - scale * codes, of scale * codes


def sketch_of(weight: Tensor, codes: Tensor | None = None) -> Sketch | None:
    """The sketch of a bfloat16 weight [N, K], in `codes` if given; None if a number is not finite.

    The second measure also has what float32 sums of K products lose, relative to the norm.
    """
    codes = torch.empty_like(weight, dtype=torch.int8) if codes is None else codes
    measures = torch.empty(3, len(weight), dtype=torch.float32)
    lost = weight.shape[1] * 2.0**-23
    for first in range(0, len(weight), _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        values = weight[part].float()
        scales = values.abs().amax(1) / _CODES
        if not scales.isfinite().all():
            return None
        codes[part] = (values / scales.clamp_min(2.0**-126)[:, None]).round().clamp(-_CODES, _CODES)
        given = codes[part] * scales[:, None]
        rest = (values - given).norm(dim=1) + lost * values.norm(dim=1)
        measures[:, part] = torch.stack((scales, rest, given.norm(dim=1)))
    return Sketch(codes, measures)


def _reference(
    x: Tensor, weight: Tensor, codes: Tensor, measures: Tensor, counts: Tensor
) -> Tensor:
    return torch.nn.functional.linear(x.float(), weight.float()).to(x.dtype)


_bf16_leading = operator(
    "bf16_leading(Tensor x, Tensor weight, Tensor codes, Tensor measures, Tensor counts) -> Tensor",
    _reference,
    lambda x, weight, codes, measures, counts: x.new_empty((len(x), len(weight))),
)


def bf16_leading(x: Tensor, weight: Tensor, sketch: Sketch, counts: Tensor) -> Tensor:
    """x [T, K] times the transposed weight [N, K], as bfloat16 [T, N].

    Of a row the `count` (int64 [T]) largest, and what equals the least of them, are those of
    bf16_linear bit for bit; each other product is that too, or -inf. A row with a number that is
    not finite is computed as a whole. Raises RuntimeError for other dtypes or shapes.
    """
    return _bf16_leading(x, weight, *sketch, counts)

"""The weights of experts in the layout of nvfp4_linear/weight.py."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from nibble_kernels.nvfp4_linear.weight import prepare_weight

_PREPARED_BYTES = 64 << 20  # of codes that are prepared together


class PreparedExperts(NamedTuple):
    """The prepared weights of E experts: tensors of PreparedWeight with a first dimension E.

    global_scales: float32 [E, 2], one for each half of an expert's rows.
    """

    codes: Tensor
    scales: Tensor
    global_scales: Tensor
    rows: int
    native: bool


def prepare_experts(
    codes: Tensor, scales: Tensor, global_scales: Tensor, native: bool
) -> PreparedExperts:
    """prepare_weight for all experts, some at a time, because its temporary tensors are several
    times as large. global_scales: float32 [E, 2] (gate and up) or [E].
    """
    step = max(1, _PREPARED_BYTES // codes[0].numel())
    all_codes, all_scales = codes.new_empty(0), codes.new_empty(0)
    for begin in range(0, len(codes), step):
        some = slice(begin, begin + step)
        part = prepare_weight(codes[some], scales[some], native)
        if not begin:
            all_codes = codes.new_empty((len(codes), *part.codes.shape[1:]))
            all_scales = codes.new_empty((len(codes), *part.scales.shape[1:]))
        all_codes[some], all_scales[some] = part.codes, part.scales
    both = global_scales.float().reshape(len(codes), -1).expand(-1, 2).contiguous()
    return PreparedExperts(all_codes, all_scales, both, codes.shape[1], native)

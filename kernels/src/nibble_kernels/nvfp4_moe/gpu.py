"""nibble::nvfp4_moe_decode_linear: NVFP4 experts times few tokens, straight from the router's choices, on NVIDIA GPUs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nibble_kernels.library import operator
from nibble_kernels.nvfp4_linear.reference import matmul
from nibble_kernels.nvfp4_linear.weight import PreparedWeight, prepare_weight, stored_weight

__all__ = ["MAX_PAIRS", "MAX_TOKENS", "PreparedExperts", "nvfp4_moe_decode_linear", "prepare_experts"]

MAX_PAIRS, MAX_TOKENS = 64, 16


class PreparedExperts(NamedTuple):
    """Codes and scales as those of prepared weights, with the experts before; global_scales float32 [E, 2]: a half each."""

    codes: Tensor
    scales: Tensor
    global_scales: Tensor
    rows: int
    native: bool


def prepare_experts(codes: Tensor, scales: Tensor, global_scales: Tensor, native: bool) -> PreparedExperts:
    """As prepare_weight for each expert; global_scales float32 [E, 2] (gate and up) or [E]."""
    experts = [prepare_weight(*expert, native) for expert in zip(codes, scales, strict=True)]
    both = global_scales.float().reshape(len(codes), -1).expand(-1, 2).contiguous()
    tiled_codes, tiled_scales, _, _ = zip(*experts, strict=True)
    return PreparedExperts(torch.stack(tiled_codes), torch.stack(tiled_scales), both, codes.shape[1], native)


def _reference(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    global_scales: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    rows: int,
    native: bool,
    silu_mul: bool,
) -> Tensor:
    """The specification: float32 throughout, rounded once at the end."""
    ids = topk_ids.reshape(-1)
    inputs = x.repeat_interleave(len(ids) // max(len(x), 1), 0).float()
    y = torch.zeros(len(ids), rows // (2 if silu_mul else 1), device=x.device)
    for expert in ids[(ids >= 0) & (ids < len(codes))].unique().tolist():
        pairs = ids == expert
        stored = stored_weight(PreparedWeight(codes[expert], scales[expert], rows, native), x.shape[-1])
        sums = matmul(inputs[pairs], *stored) * global_scales[expert].repeat_interleave(rows // 2)
        if silu_mul:
            gate, up = sums.chunk(2, dim=-1)
            sums = torch.nn.functional.silu(gate) * up
        y[pairs] = sums if topk_weights is None else sums * topk_weights.reshape(-1)[pairs, None]
    return y.to(x.dtype)


_decode = operator(
    "nvfp4_moe_decode_linear(Tensor x, Tensor codes, Tensor scales, Tensor global_scales, Tensor topk_ids, "
    "Tensor? topk_weights, int rows, bool native, bool silu_mul) -> Tensor",
    _reference,
    lambda x, codes, scales, global_scales, topk_ids, topk_weights, rows, native, silu_mul: x.new_empty(
        (topk_ids.numel(), rows // (2 if silu_mul else 1))
    ),
)


def nvfp4_moe_decode_linear(
    x: Tensor,
    experts: PreparedExperts,
    topk_ids: Tensor,
    *,
    topk_weights: Tensor | None = None,
    silu_mul: bool = False,
) -> Tensor:
    """A row for each pair of a token and one of its experts, [T·k, N] or, with silu_mul, [T·k, N/2], times topk_weights.

    topk_ids is int32 [T, k], topk_weights float32 [T, k]; x has a row for each token or, the result of the first product, one
    for each pair. At most MAX_TOKENS tokens and MAX_PAIRS pairs; a token has an expert once. An id below 0 or too large is an
    expert of another process: zeros. An expert's weights are read once, whatever the number of its tokens.
    """
    codes, scales, global_scales, rows, native = experts
    return _decode(x, codes, scales, global_scales, topk_ids, topk_weights, rows, native, silu_mul)

"""nibble::nvfp4_moe_decode_linear: NVFP4 experts times few tokens, straight from the router's choices, on NVIDIA GPUs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nibble_kernels.library import operator
from nibble_kernels.nvfp4_linear.gpu import OPERANDS
from nibble_kernels.nvfp4_linear.reference import matmul
from nibble_kernels.nvfp4_linear.weight import prepare_weight, stored_scales
from nibble_kernels.scale_layout import BLOCK

__all__ = ["MAX_PAIRS", "MAX_TOKENS", "PreparedExperts", "nvfp4_moe_decode_linear", "prepare_experts"]

MAX_PAIRS, MAX_TOKENS = 64, 16


class PreparedExperts(NamedTuple):
    """codes uint8 [E, N, K/2], scales uint8 [E, groups, chunks, 32, 4], global_scales float32 [E, 2]: a half each."""

    codes: Tensor
    scales: Tensor
    global_scales: Tensor


def prepare_experts(codes: Tensor, scales: Tensor, global_scales: Tensor) -> PreparedExperts:
    """As prepare_weight for each expert; global_scales float32 [E, 2] (gate and up) or [E]. Codes are changed in place."""
    by_lane = [prepare_weight(*expert).scales for expert in zip(codes, scales, strict=True)]
    both = global_scales.float().reshape(len(codes), -1).expand(-1, 2).contiguous()
    return PreparedExperts(codes, torch.stack(by_lane), both)


def _reference(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    global_scales: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    silu_mul: bool,
    operands: int,
) -> Tensor:
    """The specification: float32 throughout, rounded once at the end."""
    ids = topk_ids.reshape(-1)
    inputs = x.repeat_interleave(len(ids) // max(len(x), 1), 0).float()
    rows, columns = codes.shape[1], x.shape[-1]
    y = torch.zeros(len(ids), rows // (2 if silu_mul else 1), device=x.device)
    for expert in ids[(ids >= 0) & (ids < len(codes))].unique().tolist():
        pairs = ids == expert
        stored = stored_scales(scales[expert], rows, columns // BLOCK)
        sums = matmul(inputs[pairs], codes[expert], stored) * global_scales[expert].repeat_interleave(
            rows // 2
        )
        if silu_mul:
            gate, up = sums.chunk(2, dim=-1)
            sums = torch.nn.functional.silu(gate) * up
        y[pairs] = sums if topk_weights is None else sums * topk_weights.reshape(-1)[pairs, None]
    return y.to(x.dtype)


_decode = operator(
    "nvfp4_moe_decode_linear(Tensor x, Tensor codes, Tensor scales, Tensor global_scales, Tensor topk_ids, "
    "Tensor? topk_weights, bool silu_mul, int operands) -> Tensor",
    _reference,
    lambda x, codes, scales, global_scales, topk_ids, topk_weights, silu_mul, operands: x.new_empty(
        (topk_ids.numel(), codes.shape[1] // (2 if silu_mul else 1))
    ),
)


def nvfp4_moe_decode_linear(
    x: Tensor,
    experts: PreparedExperts,
    topk_ids: Tensor,
    *,
    topk_weights: Tensor | None = None,
    silu_mul: bool = False,
    operands: str = "best",
) -> Tensor:
    """A row for each pair of a token and one of its experts, [T·k, N] or, with silu_mul, [T·k, N/2], times topk_weights.

    topk_ids is int32 [T, k], topk_weights float32 [T, k]; x has a row for each token or, the result of the first product, one
    for each pair. At most MAX_TOKENS tokens and MAX_PAIRS pairs; a token has an expert once. An id below 0 or too large is an
    expert of another process: zeros. An expert's weights are read once, whatever the number of its tokens.
    """
    return _decode(x, *experts, topk_ids, topk_weights, silu_mul, OPERANDS.index(operands))

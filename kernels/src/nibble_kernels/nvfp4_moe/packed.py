"""Experts whose weights are packed as nvfp4_linear/packed.py has them, one after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nibble_kernels.library import operator
from nibble_kernels.nvfp4_linear.packed import ROWS, PackedWeight, pack_weight, stored_weight
from nibble_kernels.nvfp4_moe import (
    MOE_ARGUMENTS,
    activation_of,
    call_moe,
    fake_moe,
    reference,
)
from nibble_kernels.scale_layout import BLOCK

__all__ = ["nvfp4_packed_moe", "pack_experts"]


def _reference(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w13_global_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    *rest: Any,
) -> Tensor:
    intermediate = w2.shape[2] * BLOCK
    first = _stored(w13, w13_scale, intermediate * w13_global_scale.shape[1])
    second = _stored(w2, w2_scale, x.shape[1])
    return reference.nvfp4_moe(x, topk_weights, topk_ids, *first, w13_global_scale, *second, *rest)


def _stored(codes: Tensor, scales: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    experts = [stored_weight(PackedWeight(*each, rows)) for each in zip(codes, scales, strict=True)]
    all_codes, all_scales = zip(*experts, strict=True)
    return torch.stack(all_codes), torch.stack(all_scales)


_packed_moe = operator(f"nvfp4_packed_moe({MOE_ARGUMENTS}) -> Tensor", _reference, fake_moe)


def pack_experts(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [E, N, K/2] with scales float8_e4m3fn [E, N, K/16], as packed ones
    [E, tiles, K/16, 128] and [E, tiles, K/16, 16]; N must be a multiple of 16.

    In the same memory, so that loading needs room for one expert more and not for a second layer:
    the given tensors hold nothing useful then. Raises ValueError for other types or shapes, and
    where a scale is NaN.
    """
    experts, rows, half = codes.shape
    if rows % ROWS:
        raise ValueError(f"experts must have a multiple of {ROWS} rows; got {rows}")
    tiles, blocks = rows // ROWS, half * 2 // BLOCK
    codes, scales = codes.contiguous(), scales.contiguous()
    for expert in range(experts):
        packed = pack_weight(codes[expert], scales[expert])
        codes[expert].copy_(packed.codes.view(rows, half))
        scales[expert].copy_(packed.scales.view(rows, blocks))
    return (
        codes.view(experts, tiles, blocks, ROWS * BLOCK // 2),
        scales.view(experts, tiles, blocks, ROWS),
    )


def nvfp4_packed_moe(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w13_global_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w2_global_scale: Tensor,
    activation: str,
    *,
    w13_input_scale: Tensor | None = None,
    w2_input_scale: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    swiglu_limit: float | None = None,
    swiglu_alpha: float | None = None,
    swiglu_beta: float | None = None,
) -> Tensor:
    """nvfp4_moe for weights from pack_experts: the same bits."""
    chosen = activation_of(activation, swiglu_limit, swiglu_alpha, swiglu_beta)
    hidden, intermediate = x.shape[-1], w2.shape[2] * BLOCK
    for name, codes, rows, columns in (
        ("w13", w13, intermediate * (2 if chosen.gated else 1), hidden),
        ("w2", w2, hidden, intermediate),
    ):
        expected = [len(w13), -(-rows // ROWS), columns // BLOCK, ROWS * BLOCK // 2]
        if codes.dtype != torch.uint8 or list(codes.shape) != expected:
            raise ValueError(
                f"{name} must be packed uint8 codes {expected}; got {codes.dtype}"
                f" {list(codes.shape)}"
            )
    return call_moe(
        _packed_moe,
        x,
        topk_weights,
        topk_ids,
        (w13, w13_scale, w13_global_scale),
        (w2, w2_scale, w2_global_scale),
        chosen,
        w13_input_scale,
        w2_input_scale,
        apply_router_weight_on_input,
    )

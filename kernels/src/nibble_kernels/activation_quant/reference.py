"""NVFP4 activation quantization with a static global scale, in plain torch float32: the
specification.

For each block of 16 elements of a row, with g the reciprocal of the checkpoint's input_scale:

    scale  = E4M3(g * (max|x| * 1/6))
    factor = 1 / (scale * (1 / g)), or 0 where scale is 0
    code   = E2M1(x * factor)

with every operation rounded to float32. This is vLLM's arithmetic
(csrc/quantization/fp4/nvfp4_utils.cuh of 0.32.0) with exact reciprocals in place of rcp.approx. A
NaN makes the scale of its block NaN; vLLM replaces the element by 6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble_kernels import exact as arithmetic
from nibble_kernels.conversions.reference import e2m1_encode, e4m3_decode, e4m3_encode, pack
from nibble_kernels.scale_layout import BLOCK, tile


def nvfp4_quant(
    x: Tensor, global_scale_inv: Tensor, tiled: bool, exact: bool
) -> tuple[Tensor, Tensor]:
    """Packed codes, uint8 [..., K/2], and scales. `exact` has no effect here: only GPUs have
    approximate reciprocals.
    """
    blocks = x.float().reshape(-1, x.shape[-1] // BLOCK, BLOCK)
    g = global_scale_inv.float().reshape(())
    scale = e4m3_encode(g * (blocks.abs().amax(-1) * torch.tensor(1 / 6, dtype=torch.float32)))
    value = e4m3_decode(scale)
    factor = torch.where(value == 0, 0, 1 / (value * (1 / g)))
    codes = e2m1_encode(blocks * factor[..., None])
    scales = scale.view(torch.float8_e4m3fn)
    packed = pack(codes).reshape(*x.shape[:-1], x.shape[-1] // 2)
    return packed, tile(scales) if tiled else scales.reshape(*x.shape[:-1], x.shape[-1] // BLOCK)


def silu_mul(x: Tensor) -> Tensor:
    """silu(gate) * up of x [..., gate | up], in float32 and rounded once to x's dtype."""
    gate, up = x.float().chunk(2, dim=-1)
    return (arithmetic.silu(gate) * up).to(x.dtype)


def silu_mul_nvfp4_quant(
    x: Tensor, global_scale_inv: Tensor, tiled: bool, exact: bool
) -> tuple[Tensor, Tensor]:
    """silu_mul, then nvfp4_quant."""
    return nvfp4_quant(silu_mul(x), global_scale_inv, tiled, exact)


def add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """RMSNorm(x + residual) and x + residual, each rounded to x's dtype as in vLLM's
    fused_add_rms_norm.
    """
    total = x + residual
    z = total.float()
    mean = arithmetic.tree_sum(z * z) / x.shape[-1]
    inverse = 1 / (mean + torch.tensor(epsilon, dtype=torch.float32)).sqrt()
    return (z * inverse[..., None] * weight.float()).to(x.dtype), total


def add_rmsnorm_nvfp4_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    global_scale_inv: Tensor,
    epsilon: float,
    tiled: bool,
    exact: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """add_rmsnorm, then nvfp4_quant of the first result; the second is returned last."""
    normed, total = add_rmsnorm(x, residual, weight, epsilon)
    return *nvfp4_quant(normed, global_scale_inv, tiled, exact), total

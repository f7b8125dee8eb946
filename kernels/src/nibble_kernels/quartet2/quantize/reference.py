"""Quartet II's forward quantizer (round to nearest, and four-over-six), in plain torch float32: the
specification.

    G = 1 if amax == 0 else (amax * 1/256) * (override * 1/6)        1/448 for round to nearest
    for M in 6, 4 (6 alone for round to nearest), per block of 16:
        s_M = E4M3((max|x| * (1/M * override)) * (1 / G))
        c_M = E2M1(x * 1 / (s_M * G)), s_M taken as 1 where it is 0
        e_M = sum of (x - c_M * (s_M * G))^2
    M is 4 if e_4 < e_6, else 6; the tensor's scale is G

with every operation rounded to float32, and differences and squares computed by fused multiply-adds
in the order of the authors' kernel (IST-DASLab/Quartet-II 8776a90,
kernels/csrc/round_four_six.cu). The authors' kernel uses rcp.approx in place of exact reciprocals.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble_kernels.conversions.reference import (
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    pack,
)
from nibble_kernels.exact import fma
from nibble_kernels.scale_layout import BLOCK, tile


def quant_fp4(
    x: Tensor,
    amax: Tensor | None,
    four_over_six: bool,
    scale_override: float,
    tiled: bool,
    exact: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes [..., K/2], scales and G. `exact` has no effect here: only GPUs have approximate
    reciprocals.
    """
    blocks = x.float().reshape(-1, x.shape[-1] // BLOCK, BLOCK)
    if not blocks.numel():  # G is 1
        amax = x.new_zeros(())
    amax = (blocks.abs().amax() if amax is None else amax).float().reshape(())
    override = torch.tensor(scale_override, dtype=torch.float32, device=x.device)
    largest = 256 if four_over_six else 448
    g = (amax * torch.tensor(1 / largest, dtype=torch.float32)) * (
        override * torch.tensor(1 / 6, dtype=torch.float32)
    )
    g = torch.where(amax == 0, 1, g)
    scale, codes, error = candidate(blocks, g, override, 6)
    if four_over_six:
        other_scale, other_codes, other_error = candidate(blocks, g, override, 4)
        four = other_error < error
        scale = torch.where(four, other_scale, scale)
        codes = torch.where(four[..., None], other_codes, codes)
    scales = scale.view(torch.float8_e4m3fn)
    packed = pack(codes).reshape(*x.shape[:-1], x.shape[-1] // 2)
    return packed, tile(scales) if tiled else scales.reshape(*x.shape[:-1], x.shape[-1] // BLOCK), g


def candidate(
    blocks: Tensor, g: Tensor, override: Tensor, largest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale bytes, codes and squared errors, with each block's largest element at `largest`."""
    inverse = torch.tensor(1 / largest, dtype=torch.float32) * override
    scale = e4m3_encode((blocks.abs().amax(-1) * inverse) * (1 / g))
    value = e4m3_decode(scale)
    factor = 1 / (torch.where(value == 0, 1, value) * g)
    codes = e2m1_encode(blocks * factor[..., None])
    difference = fma(-e2m1_decode(codes), (value * g)[..., None], blocks)
    # In the kernel two threads have eight elements each, and each thread sums even and odd elements
    # separately.
    difference = difference.unflatten(-1, (2, 4, 2))
    error = torch.zeros_like(difference[..., 0, :])
    for index in range(4):
        error = fma(difference[..., index, :], difference[..., index, :], error)
    lanes = error[..., 0] + error[..., 1]
    return scale, codes, lanes[..., 0] + lanes[..., 1]

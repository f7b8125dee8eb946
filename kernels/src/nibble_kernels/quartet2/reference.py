"""Quartet II's quantization of activations to NVFP4, with three choices of the scale G: the
specification.

    A = amax if given, else max|x|, of each row (token) or of all rows (batch, batch-pow2)
    batch:               G = quant_fp4's, about A / 1536
    batch-pow2, token:   G = 2^k with the smallest k for which 1536 * 2^k >= A, and 1 where A is 0
    codes, scales = quant_fp4 of x / G with a tensor scale of 1 (four-over-six)

x / G is exact for a power of two. 1536 is 6 * 256: the block with the largest element has the scale
256 with that element at 6, or 384 with it at 4. Both are E4M3 values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble_kernels.conversions import e2m1_decode, e4m3_decode
from nibble_kernels.quartet2.quantize import quant_fp4
from nibble_kernels.scale_layout import BLOCK

LARGEST = 1536.0
# In the bits of a float32: LARGEST is 1.5 * 2^10, so a number with a larger fraction needs the next
# power of two.
ABOVE_LARGEST = 0x3FFFFF
EXPONENT_OF_LARGEST = 10


def quartet2_quant(
    x: Tensor, amax: Tensor | None, mode: str, tiled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [M, K/2], scales, and G of x [M, K]. G is float32, [M, 1] by token and else []."""
    if mode == "batch":
        return quant_fp4(x, amax, four_over_six=True, tiled=tiled)
    if mode == "token":
        amax = x.abs().amax(-1, keepdim=True) if amax is None else amax.reshape(-1, 1)
    elif amax is None:
        amax = x.abs().amax() if x.numel() else x.new_zeros(())
    else:
        amax = amax.reshape(())
    g, inverse = power_of_two(amax.float())
    # In x's dtype, which the GPU's kernel reads. Numbers that underflow in float16 have the code 0
    # in any case.
    scaled = (x.float() * inverse).to(x.dtype)
    largest = torch.full((), LARGEST, dtype=torch.float32, device=x.device)
    codes, scales, _ = quant_fp4(scaled, largest, four_over_six=True, tiled=tiled)
    return codes, scales, g


def power_of_two(amax: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest power of two G with LARGEST * G >= amax, and 1/G. Both are 1 for amax 0, and
    normal numbers otherwise.
    """
    field = (amax.contiguous().view(torch.int32) + ABOVE_LARGEST) >> 23
    field = field - EXPONENT_OF_LARGEST  # of G
    field = torch.where(amax == 0, 127, field).clamp(1, 253)
    return (field << 23).view(torch.float32), ((254 - field) << 23).view(torch.float32)


def nvfp4_dequantize(codes: Tensor, scales: Tensor, g: Tensor, dtype: torch.dtype) -> Tensor:
    """code * scale * G of codes [M, K/2], linear scales [M, K/16] and G [] or [M, 1], rounded once
    to `dtype`.
    """
    values = e2m1_decode(codes).unflatten(-1, (-1, BLOCK)) * e4m3_decode(scales)[..., None]
    return (values.flatten(-2) * g).to(dtype)

"""A linear layer with an NVFP4 weight, in plain torch float32: the specification.

    y = Σ_k x[k] · code[n, k] · scale[n, k / 16]  ·  global_scale  ·  column_scale[n]  +  bias[n]

in that order, with every operation in float32 and y rounded once to x's dtype. A code times its
scale is exact, because it has at most six bits. With input_scale_inv, nvfp4_quant first rounds x to
NVFP4, and global_scale is multiplied by 1 / input_scale_inv. Only the order of the sum over k is
not specified.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble_kernels.activation_quant.reference import nvfp4_quant
from nibble_kernels.conversions.reference import e2m1_decode, e4m3_decode, unpack
from nibble_kernels.scale_layout import BLOCK

ROWS_AT_A_TIME = 1024  # of the weight, to limit the size of the float32 copy


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes [..., K/2] times block scales [..., K/16]: float32 [..., K], without global scales."""
    values = e2m1_decode(unpack(codes)).unflatten(-1, (-1, BLOCK))
    return (values * e4m3_decode(scales.view(torch.uint8))[..., None]).flatten(-2)


def round_to_nvfp4(x: Tensor, input_scale_inv: Tensor) -> Tensor:
    """x rounded to NVFP4, as codes times block scales in float32, without the global scale."""
    return dequantize(*nvfp4_quant(x, input_scale_inv, tiled=False, exact=True))


def matmul(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """x [M, K] times the transposed weight, in float32, without global scales."""
    parts = zip(weight.split(ROWS_AT_A_TIME), scales.split(ROWS_AT_A_TIME), strict=True)
    return torch.cat([x @ dequantize(*part).T for part in parts], dim=-1)


def epilogue(
    y: Tensor, column_scale: Tensor | None, bias: Tensor | None, silu_mul: bool = False
) -> Tensor:
    """Sums y [M, N] in float32 times column factors [N], plus bias [N]; with silu_mul silu of the
    first half times the second, [M, N/2].
    """
    if column_scale is not None:
        y = y * column_scale
    if bias is not None:
        y = y + bias.float()
    if silu_mul:
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    return y


def nvfp4_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    column_scale: Tensor | None,
    bias: Tensor | None,
    input_scale_inv: Tensor | None,
) -> Tensor:
    """The operator nibble::nvfp4_linear."""
    rows, alpha = x.reshape(-1, x.shape[-1]), global_scale.reshape(())
    if input_scale_inv is None:
        rows = rows.float()
    else:
        rows = round_to_nvfp4(rows, input_scale_inv)
        alpha = alpha * (1 / input_scale_inv.reshape(()))
    y = epilogue(matmul(rows, weight, scales) * alpha, column_scale, bias)
    return y.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])

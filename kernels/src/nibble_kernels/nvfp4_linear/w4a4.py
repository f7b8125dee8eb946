"""nibble::nvfp4_w4a4_linear and nvfp4_w4a4_weight_linear: NVFP4 activations times a prepared NVFP4
weight, on NVIDIA GPUs.

Made for SM12x. Other GPUs emulate its products, which is for tests: docs/kernels/blackwell.md.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from nibble_kernels.activation_quant import (
    add_rmsnorm_nvfp4_quant,
    nvfp4_quant,
    silu_mul_nvfp4_quant,
)
from nibble_kernels.library import operator
from nibble_kernels.nvfp4_linear import shape
from nibble_kernels.nvfp4_linear.reference import dequantize, epilogue, matmul
from nibble_kernels.nvfp4_linear.weight import PreparedWeight, stored_weight
from nibble_kernels.scale_layout import BLOCK, tile, tiled_shape, untile

__all__ = [
    "QuantizedRows",
    "add_rmsnorm_nvfp4_w4a4_linear",
    "nvfp4_w4a4_linear",
    "nvfp4_w4a4_product",
    "nvfp4_w4a4_weight_linear",
    "quantized_rows",
    "silu_mul_nvfp4_w4a4_linear",
]

COLUMN_MULTIPLE = 32  # of a weight's columns: a lane has two blocks of 16


def product_reference(
    x_codes: Tensor,
    x_scales: Tensor,
    codes: Tensor,
    scales: Tensor,
    outputs: int,
    global_scale: float,
    column_scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    silu_mul: bool,
    half: bool,
) -> Tensor:
    """The specification: float32 throughout, rounded once at the end."""
    rows = x_codes.reshape(-1, x_codes.shape[-1])
    columns = 2 * rows.shape[1]
    if x_scales.shape != (tiled := tiled_shape(len(rows), columns // BLOCK)):
        raise ValueError(
            f"expected scales of {len(rows)} by {columns} in 128x4 tiles, {list(tiled)}; got"
            f" {shape(x_scales)}"
        )
    x = dequantize(rows, untile(x_scales, len(rows), columns // BLOCK))
    y = matmul(x, *stored_weight(PreparedWeight(codes, scales, outputs, True), columns))
    y = y * global_scale
    y = epilogue(y, column_scale, bias, silu_mul).unflatten(0, x_codes.shape[:-1])
    if residual is not None:
        y = y + residual.float()
    return y.to(torch.float16 if half else torch.bfloat16)


def _product_fake(
    x_codes: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, outputs: int, *rest: object
) -> Tensor:
    return x_codes.new_empty(
        (*x_codes.shape[:-1], outputs // (2 if rest[4] else 1)),
        dtype=torch.float16 if rest[5] else torch.bfloat16,
    )


_product = operator(
    "nvfp4_w4a4_linear(Tensor x_codes, Tensor x_scales, Tensor codes, Tensor scales, int outputs,"
    " float global_scale, Tensor? column_scale, Tensor? bias, Tensor? residual, bool silu_mul, bool"
    " half) -> Tensor",
    product_reference,
    _product_fake,
)


def _weight_reference(
    x: Tensor,
    input_scale_inv: Tensor,
    codes: Tensor,
    scales: Tensor,
    outputs: int,
    global_scale: float,
    column_scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    silu_mul: bool,
) -> Tensor:
    """The specification: nvfp4_quant's, then the product's."""
    options = (column_scale, bias, residual, silu_mul, x.dtype == torch.float16)
    return _product(
        *nvfp4_quant(x, input_scale_inv), codes, scales, outputs, global_scale, *options
    )


_linear = operator(
    "nvfp4_w4a4_weight_linear(Tensor x, Tensor input_scale_inv, Tensor codes, Tensor scales, int"
    " outputs, float global_scale, Tensor? column_scale, Tensor? bias, Tensor? residual, bool"
    " silu_mul) -> Tensor",
    _weight_reference,
    lambda x, input_scale_inv, codes, scales, outputs, *rest: x.new_empty(
        (*x.shape[:-1], outputs // (2 if rest[4] else 1))
    ),
)


class QuantizedRows(NamedTuple):
    """Activations for nvfp4_w4a4_product, as quantized_rows makes them.

    codes: uint8 [..., K/2]; tiled_scales: float8_e4m3fn, in 128x4 tiles. The shape of a tensor does
    not tell its layout: with rows in 128s and K in 64s scales row by row have the same.
    """

    codes: Tensor
    tiled_scales: Tensor


def quantized_rows(codes: Tensor, scales: Tensor, *, tiled: bool) -> QuantizedRows:
    """Codes, uint8 [..., K/2], with the scales that nvfp4_quant gives with this `tiled`.

    Scales row by row are copied into tiles. Raises ValueError for scales of another type or shape.
    """
    if scales.dtype != torch.float8_e4m3fn:
        raise ValueError(f"expected float8_e4m3fn scales; got {scales.dtype}")
    rows, blocks = math.prod(codes.shape[:-1]), codes.shape[-1] // (BLOCK // 2)
    expected = tiled_shape(rows, blocks) if tiled else (*codes.shape[:-1], blocks)
    if scales.shape != expected:
        layout = "in 128x4 tiles" if tiled else "row by row"
        raise ValueError(f"expected scales {layout}, {list(expected)}; got {shape(scales)}")
    return QuantizedRows(codes, scales if tiled else tile(scales.reshape(rows, blocks)))


def nvfp4_w4a4_product(
    x: QuantizedRows,
    weight: PreparedWeight,
    global_scale: float,
    dtype: torch.dtype,
    *,
    column_scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    silu_mul: bool = False,
) -> Tensor:
    """x [..., K] times the weight: [..., N] of `dtype`.

    y = Σ_k x[k] · code[n, k] · scale[n, k/16] · global_scale · column_scale[n] + bias[n], summed in
    float32; with silu_mul silu(y[n]) · y[n + N/2], [..., N/2]. Rounded once; a residual of the
    result's shape is then added, and the sum is rounded. global_scale: the weight's times the
    activations'. K must be a multiple of 32, N of 8. The weight is prepared with native=True;
    nvfp4_decode_linear takes the same. More than 512 rows are multiplied in slices. Raises
    ValueError, and TypeError for an x that does not tell the layout of its scales. The order of
    additions depends on K, N, the number of rows of a slice and the GPU's number of
    multiprocessors.
    """
    if not isinstance(x, QuantizedRows):
        raise TypeError(
            "expected QuantizedRows, because scales row by row and in 128x4 tiles can have the same"
            f" shape; got {type(x).__name__}. Use quantized_rows(codes, scales, tiled=…)."
        )
    _check(weight, dtype, 2 * x.codes.shape[-1])
    half = dtype == torch.float16
    return _product(*x, *weight[:3], global_scale, column_scale, bias, residual, silu_mul, half)


def _check(weight: PreparedWeight, dtype: torch.dtype, columns: int) -> None:
    """Raises ValueError for what the kernel does not take."""
    if not weight.native:
        raise ValueError("the weight must be prepared with native=True")
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"expected bfloat16 or float16; got {dtype}")
    if columns % COLUMN_MULTIPLE:
        raise ValueError(f"rows must have a multiple of {COLUMN_MULTIPLE} columns; got {columns}")


class SumOptions(TypedDict, total=False):
    """Options of nvfp4_w4a4_product, which describes them, without the residual."""

    column_scale: Tensor | None
    bias: Tensor | None
    silu_mul: bool


class ProductOptions(SumOptions, total=False):
    """All options of nvfp4_w4a4_product."""

    residual: Tensor | None


def nvfp4_w4a4_weight_linear(
    x: Tensor,
    input_scale_inv: Tensor,
    weight: PreparedWeight,
    global_scale: float,
    *,
    column_scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    silu_mul: bool = False,
) -> Tensor:
    """nvfp4_w4a4_linear as one operator, for layers of a server: any number of rows, one format of
    activations for all of them.
    """
    _check(weight, x.dtype, x.shape[-1])
    options = (column_scale, bias, residual, silu_mul)
    return _linear(x, input_scale_inv, *weight[:3], global_scale, *options)


def nvfp4_w4a4_linear(
    x: Tensor,
    input_scale_inv: Tensor,
    weight: PreparedWeight,
    global_scale: float,
    **options: Unpack[ProductOptions],
) -> Tensor:
    """nvfp4_w4a4_product of nvfp4_quant(x, input_scale_inv)."""
    quantized = quantized_rows(*nvfp4_quant(x, input_scale_inv), tiled=True)
    return nvfp4_w4a4_product(quantized, weight, global_scale, x.dtype, **options)


def silu_mul_nvfp4_w4a4_linear(
    x: Tensor,
    input_scale_inv: Tensor,
    weight: PreparedWeight,
    global_scale: float,
    **options: Unpack[ProductOptions],
) -> Tensor:
    """nvfp4_w4a4_product of silu(gate) · up, for x [..., gate | up]: one kernel quantizes both."""
    quantized = quantized_rows(*silu_mul_nvfp4_quant(x, input_scale_inv), tiled=True)
    return nvfp4_w4a4_product(quantized, weight, global_scale, x.dtype, **options)


def add_rmsnorm_nvfp4_w4a4_linear(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    input_scale_inv: Tensor,
    epsilon: float,
    weight: PreparedWeight,
    global_scale: float,
    **options: Unpack[SumOptions],
) -> tuple[Tensor, Tensor]:
    """nvfp4_w4a4_product of RMSNorm(x + residual) · norm_weight, and x + residual."""
    codes, scales, total = add_rmsnorm_nvfp4_quant(
        x, residual, norm_weight, input_scale_inv, epsilon
    )
    quantized = quantized_rows(codes, scales, tiled=True)
    y = nvfp4_w4a4_product(quantized, weight, global_scale, x.dtype, **options)
    return y, total

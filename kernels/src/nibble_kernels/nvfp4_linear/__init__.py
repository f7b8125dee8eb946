"""nibble::nvfp4_linear: a linear layer with an NVFP4 weight, and unquantized or quantized
activations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble_kernels.library import operator
from nibble_kernels.nvfp4_linear import reference
from nibble_kernels.scale_layout import BLOCK

__all__ = ["cpu_levels", "nvfp4_linear", "use_cpu_level"]

LEVELS = ("portable", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx")

_nvfp4_linear = operator(
    "nvfp4_linear(Tensor x, Tensor weight, Tensor scales, Tensor global_scale, Tensor?"
    " column_scale, Tensor? bias, Tensor? input_scale_inv) -> Tensor",
    reference.nvfp4_linear,
    lambda x, weight, scales, global_scale, column_scale, bias, input_scale_inv: x.new_empty(
        (*x.shape[:-1], weight.shape[0])
    ),
)
_cpu_levels = operator(
    "nvfp4_cpu_levels(Tensor like) -> Tensor",
    lambda like: torch.empty(0, dtype=torch.int64),
    lambda like: torch.empty(0, dtype=torch.int64),
)
_use_cpu_level = operator(
    "nvfp4_use_cpu_level(Tensor like, int level) -> ()",
    lambda like, level: None,
    lambda like, level: None,
)


def nvfp4_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    *,
    column_scale: Tensor | None = None,
    bias: Tensor | None = None,
    input_scale_inv: Tensor | None = None,
) -> Tensor:
    """x [..., K] times the transposed NVFP4 weight: [..., N] in x's dtype (see reference.py).

    weight: uint8 [N, K/2], the even column in the low nibble; scales: float8_e4m3fn [N, K/16], row
    by row; global_scale: one float32, a multiplier; column_scale: float32 [N]; bias: [N].
    input_scale_inv: one float32; quantizes x as nvfp4_quant does (W4A4). None: W4A16.
    The result is rounded only once, after the bias. Raises ValueError if dtypes or shapes do not
    fit.
    """
    check_weight(x.shape[-1], weight, scales, "weight")
    check_factors(weight.shape[0], global_scale, column_scale, bias, input_scale_inv)
    return _nvfp4_linear(x, weight, scales, global_scale, column_scale, bias, input_scale_inv)


def check_factors(
    rows: int,
    global_scale: Tensor,
    column_scale: Tensor | None,
    bias: Tensor | None,
    input_scale_inv: Tensor | None,
) -> None:
    """That the factors and the bias fit a weight of `rows` rows."""
    check_factor(global_scale, (), "global_scale")
    if column_scale is not None:
        check_factor(column_scale, (rows,), "column_scale")
    if bias is not None and bias.shape != (rows,):
        raise ValueError(
            f"bias must have one element for each of {rows} weight rows; got {shape(bias)}"
        )
    if input_scale_inv is not None:
        check_factor(input_scale_inv, (), "input_scale_inv")


def check_weight(columns: int, weight: Tensor, scales: Tensor, name: str) -> None:
    """Raise ValueError unless codes and scales have the right dtypes and shapes for rows of
    `columns` elements.
    """
    if columns % BLOCK:
        raise ValueError(f"NVFP4 has blocks of {BLOCK} columns; got rows of {columns}")
    if weight.dtype != torch.uint8 or scales.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"{name} must be uint8 codes with float8_e4m3fn scales; got {weight.dtype} and"
            f" {scales.dtype}"
        )
    if weight.shape[-1] != columns // 2 or scales.shape != (*weight.shape[:-1], columns // BLOCK):
        raise ValueError(
            f"{name} must be codes [..., {columns // 2}] with scales [..., {columns // BLOCK}] for"
            f" rows of {columns}; got {shape(weight)} and {shape(scales)}"
        )


def check_factor(factor: Tensor, expected: tuple[int, ...], name: str) -> None:
    """Raise ValueError unless `factor` is float32 of the expected shape. For the expected shape (),
    one element of any shape fits.
    """
    fits = factor.numel() == 1 if not expected else factor.shape == expected
    if factor.dtype != torch.float32 or not fits:
        raise ValueError(
            f"{name} must be float32 {list(expected)}; got {factor.dtype} {shape(factor)}"
        )


def shape(x: Tensor) -> str:
    return str(list(x.shape))


def cpu_levels() -> list[str]:
    """The instruction sets that the compiled code can use on this processor, best first.

    Empty without compiled code.
    """
    return [LEVELS[level] for level in _cpu_levels(torch.empty(0)).tolist()]


def use_cpu_level(level: str) -> None:
    """Make all products use this instruction set, one of cpu_levels(). The default is the best.

    For tests.
    """
    _use_cpu_level(torch.empty(0), cpu_levels().index(level))

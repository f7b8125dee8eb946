"""nibble::nvfp4_quant, silu_mul_nvfp4_quant and add_rmsnorm_nvfp4_quant: quantize activations to
NVFP4 with a static global scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble_kernels.activation_quant import reference
from nibble_kernels.library import operator
from nibble_kernels.scale_layout import BLOCK, tiled_shape

__all__ = ["add_rmsnorm_nvfp4_quant", "nvfp4_quant", "silu_mul_nvfp4_quant"]


def empty_outputs(x: Tensor, columns: int, tiled: bool) -> tuple[Tensor, Tensor]:
    """Uninitialized codes and scales for x's rows with `columns` elements each."""
    leading, blocks = x.shape[:-1], columns // BLOCK
    shape = tiled_shape(x.numel() // x.shape[-1], blocks) if tiled else (*leading, blocks)
    return (
        x.new_empty((*leading, columns // 2), dtype=torch.uint8),
        x.new_empty(shape, dtype=torch.float8_e4m3fn),
    )


_nvfp4_quant = operator(
    "nvfp4_quant(Tensor x, Tensor global_scale_inv, bool tiled, bool exact) -> (Tensor, Tensor)",
    reference.nvfp4_quant,
    lambda x, global_scale_inv, tiled, exact: empty_outputs(x, x.shape[-1], tiled),
)
_silu_mul_nvfp4_quant = operator(
    "silu_mul_nvfp4_quant(Tensor x, Tensor global_scale_inv, bool tiled, bool exact) -> (Tensor,"
    " Tensor)",
    reference.silu_mul_nvfp4_quant,
    lambda x, global_scale_inv, tiled, exact: empty_outputs(x, x.shape[-1] // 2, tiled),
)
_add_rmsnorm_nvfp4_quant = operator(
    "add_rmsnorm_nvfp4_quant(Tensor x, Tensor residual, Tensor weight, Tensor global_scale_inv,"
    " float epsilon, bool tiled, bool exact) -> (Tensor, Tensor, Tensor)",
    reference.add_rmsnorm_nvfp4_quant,
    lambda x, residual, weight, global_scale_inv, epsilon, tiled, exact: (
        *empty_outputs(x, x.shape[-1], tiled),
        torch.empty_like(x, memory_format=torch.contiguous_format),
    ),
)


def nvfp4_quant(
    x: Tensor, global_scale_inv: Tensor, *, tiled: bool = True, exact: bool = True
) -> tuple[Tensor, Tensor]:
    """Codes, uint8 [..., K/2], and block scales, float8_e4m3fn, of x [..., K]. Raises ValueError.

    The code of the even column is in the low nibble. global_scale_inv: 1/input_scale, one float32.
    tiled: scales are in 128x4 tiles, with rows padded to a multiple of 128 and K/16 to one of 4 by
    zeros; else [..., K/16]. exact=False uses the GPU's approximate reciprocals, as vLLM's kernel.
    """
    _check(x, x.shape[-1])
    return _nvfp4_quant(x, global_scale_inv, tiled, exact)


def silu_mul_nvfp4_quant(
    x: Tensor, global_scale_inv: Tensor, *, tiled: bool = True, exact: bool = True
) -> tuple[Tensor, Tensor]:
    """nvfp4_quant of silu(gate) * up, for x [..., gate | up]. exact=False also uses the GPU's
    approximate exp.
    """
    _check(x, x.shape[-1] // 2)
    return _silu_mul_nvfp4_quant(x, global_scale_inv, tiled, exact)


def add_rmsnorm_nvfp4_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    global_scale_inv: Tensor,
    epsilon: float,
    *,
    tiled: bool = True,
    exact: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """nvfp4_quant of RMSNorm(x + residual) * weight, and x + residual for the next layer."""
    _check(x, x.shape[-1])
    return _add_rmsnorm_nvfp4_quant(x, residual, weight, global_scale_inv, epsilon, tiled, exact)


def _check(x: Tensor, columns: int) -> None:
    if columns % BLOCK:
        raise ValueError(
            f"NVFP4 has blocks of {BLOCK} columns; got rows of {columns} (shape {tuple(x.shape)})"
        )

"""nibble::nvfp4_sparse_linear: few rows of activations times a 2:4 sparse NVFP4 weight, on NVIDIA
GPUs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble_kernels.library import operator
from nibble_kernels.nvfp4_linear.reference import dequantize, epilogue, matmul
from nibble_kernels.nvfp4_sparse.weight import (
    NotSparseError,
    SparseWeight,
    dense_weight,
    pack_sparse,
    share_that_is_not_sparse,
)

__all__ = [
    "NotSparseError",
    "SparseWeight",
    "dense_weight",
    "nvfp4_sparse_linear",
    "nvfp4_sparse_weight_linear",
    "pack_sparse",
    "share_that_is_not_sparse",
]

# Above this number torch multiplies a dense copy: the kernel reads the weight for each 16 rows.
MAX_SPARSE_ROWS = 64


def _reference(
    x: Tensor,
    codes: Tensor,
    places: Tensor,
    scales: Tensor,
    outputs: int,
    native: bool,
    global_scale: float,
    column_scale: Tensor | None,
    bias: Tensor | None,
    silu_mul: bool,
) -> Tensor:
    """The specification: the dense weight, float32 throughout, rounded once at the end."""
    rows, weight = x.reshape(-1, x.shape[-1]), SparseWeight(codes, places, scales, outputs, native)
    y = matmul(rows.float(), *dense_weight(weight, x.shape[-1])) * global_scale
    y = epilogue(y, column_scale, bias, silu_mul)
    return y.to(x.dtype).unflatten(0, x.shape[:-1])


def _fake(
    x: Tensor, codes: Tensor, places: Tensor, scales: Tensor, outputs: int, *rest: object
) -> Tensor:
    return x.new_empty((*x.shape[:-1], outputs // (2 if rest[4] else 1)))


_operator = operator(
    "nvfp4_sparse_linear(Tensor x, Tensor codes, Tensor places, Tensor scales, int outputs, bool"
    " native, float global_scale, Tensor? column_scale, Tensor? bias, bool silu_mul) -> Tensor",
    _reference,
    _fake,
)


def nvfp4_sparse_linear(
    x: Tensor,
    weight: SparseWeight,
    global_scale: float,
    *,
    column_scale: Tensor | None = None,
    bias: Tensor | None = None,
    silu_mul: bool = False,
) -> Tensor:
    """x [..., K], bfloat16 or float16, times the weight: [..., N], or [..., N/2] with silu_mul.

    y = Σ_k x[k] · code[n, k] · scale[n, k/16] · global_scale · column_scale[n] + bias[n], summed in
    float32; with silu_mul silu(y[n]) · y[n + N/2]. Rounded once. Made for up to 16 rows, which a
    launch takes at a time. A row's result does not depend on the other rows.
    """
    return _operator(x, *weight, global_scale, column_scale, bias, silu_mul)


def _weight_linear(
    x: Tensor,
    codes: Tensor,
    places: Tensor,
    scales: Tensor,
    outputs: int,
    native: bool,
    global_scale: float,
    column_scale: Tensor | None,
    bias: Tensor | None,
    silu_mul: bool,
    batch_invariant: bool,
) -> Tensor:
    weight = SparseWeight(codes, places, scales, outputs, native)
    rows = x.reshape(-1, x.shape[-1])
    if batch_invariant or len(rows) <= MAX_SPARSE_ROWS:
        return _operator(x, *weight, global_scale, column_scale, bias, silu_mul)
    dense = dequantize(*dense_weight(weight, x.shape[-1])).to(x.dtype).T
    if x.is_cuda:
        y = torch.mm(rows, dense, out_dtype=torch.float32) * global_scale
    else:
        y = rows.float() @ dense.float() * global_scale
    y = epilogue(y, column_scale, bias, silu_mul)
    return y.to(x.dtype).unflatten(0, x.shape[:-1])


_weight_operator = operator(
    "nvfp4_sparse_weight_linear(Tensor x, Tensor codes, Tensor places, Tensor scales, int outputs,"
    " bool native, float global_scale, Tensor? column_scale, Tensor? bias, bool silu_mul, bool"
    " batch_invariant) -> Tensor",
    _weight_linear,
    _fake,
)


def nvfp4_sparse_weight_linear(
    x: Tensor,
    weight: SparseWeight,
    global_scale: float,
    *,
    column_scale: Tensor | None = None,
    bias: Tensor | None = None,
    silu_mul: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    """nvfp4_sparse_linear for any number of rows. One operator, which chooses when it runs.

    Above MAX_SPARSE_ROWS rows, unless batch_invariant, the weight is dequantized, exactly, into
    temporary tensors of about 30 bytes an element, and torch multiplies.
    """
    return _weight_operator(x, *weight, global_scale, column_scale, bias, silu_mul, batch_invariant)

"""nibble::nvfp4_weight_linear, nvfp4_decode_linear and nvfp4_dequantize_weight: linear layers with
a prepared NVFP4 weight and unquantized activations, on NVIDIA GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nibble_kernels.library import operator
from nibble_kernels.nvfp4_linear.reference import dequantize, epilogue, matmul
from nibble_kernels.nvfp4_linear.weight import PreparedWeight, stored_weight

__all__ = [
    "MAX_DECODE_ROWS",
    "nvfp4_decode_linear",
    "nvfp4_dequantize_weight",
    "nvfp4_warpgroup_linear",
    "nvfp4_weight_linear",
]

# Which kernel multiplies, as in weight_linear.cu. Above this number torch multiplies a dequantized
# copy. Derived from an estimate and not measured: docs/kernels/nvfp4_linear.md.
MAX_DECODE_ROWS = 64
# On SM90: above the first the warpgroup kernel multiplies, above the second torch does if the
# product is large. Measured on an H200: docs/kernels/nvfp4_linear.md.
MAX_DECODE_ROWS_SM90, MAX_WARPGROUP_ROWS = 16, 1024


def _decode_reference(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    outputs: int,
    native: bool,
    global_scale: float,
    column_scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    silu_mul: bool,
    batch_invariant: bool,
    division: Sequence[int],
) -> Tensor:
    """The specification: float32 throughout, rounded once at the end."""
    rows = x.reshape(-1, x.shape[-1]).float()
    y = (
        matmul(rows, *stored_weight(PreparedWeight(codes, scales, outputs, native), x.shape[-1]))
        * global_scale
    )
    y = epilogue(y, column_scale, bias, silu_mul)
    y = y.unflatten(0, x.shape[:-1])
    if residual is not None:
        y = y + residual.float()
    return y.to(x.dtype)


def _linear_fake(x: Tensor, codes: Tensor, scales: Tensor, outputs: int, *rest: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], outputs // (2 if rest[5] else 1)))


def _dequantize_reference(
    codes: Tensor, scales: Tensor, rows: int, native: bool, columns: int, like: Tensor
) -> Tensor:
    def values(codes: Tensor, scales: Tensor) -> Tensor:
        stored = stored_weight(PreparedWeight(codes, scales, rows, native), columns)
        return dequantize(*stored).to(like.dtype)

    if codes.ndim == 5:
        return values(codes, scales)
    return torch.stack([values(*expert) for expert in zip(codes, scales, strict=True)])


def _weight_linear(x: Tensor, *rest: Any) -> Tensor:
    """Elsewhere than on a GPU, where weight_linear.cu chooses."""
    *product, batch_invariant = rest
    if batch_invariant or x.numel() // x.shape[-1] <= MAX_DECODE_ROWS:
        return _decode(x, *rest, [])
    return _dense(x, *product)


def _dense_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    outputs: int,
    native: bool,
    global_scale: float,
    column_scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    silu_mul: bool,
) -> Tensor:
    columns = x.shape[-1]
    rows = x.reshape(-1, columns)
    dense = _dequantize(codes, scales, outputs, native, columns, x).T
    if column_scale is None:
        # Where nothing comes between, torch adds the residual as it adds a bias.
        added = residual if bias is None and not silu_mul else None
        residual = None if added is not None else residual
        added = bias if added is None else added.reshape(len(rows), -1)
        y = torch.addmm(
            rows.new_empty(1) if added is None else added,
            rows,
            dense,
            beta=int(added is not None),
            alpha=global_scale,
        )
    else:
        sums = (
            torch.mm(rows, dense, out_dtype=torch.float32)
            if x.is_cuda
            else rows.float() @ dense.float()
        )
        y = sums * global_scale * column_scale
        y = (y if bias is None else y + bias.float()).to(x.dtype)
    if silu_mul:
        y = _silu_mul(y)
    y = y.unflatten(0, x.shape[:-1])
    return y if residual is None else y.add_(residual)


_decode = operator(
    "nvfp4_decode_linear(Tensor x, Tensor codes, Tensor scales, int outputs, bool native, float"
    " global_scale, Tensor? column_scale, Tensor? bias, Tensor? residual, bool silu_mul, bool"
    " batch_invariant, int[] division) -> Tensor",
    _decode_reference,
    _linear_fake,
)
_dequantize = operator(
    "nvfp4_dequantize_weight(Tensor codes, Tensor scales, int rows, bool native, int columns,"
    " Tensor like) -> Tensor",
    _dequantize_reference,
    lambda codes, scales, rows, native, columns, like: like.new_empty(
        (*codes.shape[:-5], rows, columns)
    ),
)


def _warpgroup_reference(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    outputs: int,
    native: bool,
    global_scale: float,
    column_scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    silu_mul: bool,
    division: Sequence[int],
) -> Tensor:
    """The specification: the decode kernel's."""
    weight = (codes, scales, outputs, native, global_scale)
    return _decode_reference(x, *weight, column_scale, bias, residual, silu_mul, False, division)


_warpgroup = operator(
    "nvfp4_warpgroup_linear(Tensor x, Tensor codes, Tensor scales, int outputs, bool native, float"
    " global_scale, Tensor? column_scale, Tensor? bias, Tensor? residual, bool silu_mul, int[]"
    " division) -> Tensor",
    _warpgroup_reference,
    _linear_fake,
)


def _silu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


_silu_mul = operator(
    "silu_mul(Tensor gate_up) -> Tensor",
    _silu_mul_reference,
    lambda gate_up: gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2)),
)

_dense = operator(
    "nvfp4_dense_linear(Tensor x, Tensor codes, Tensor scales, int outputs, bool native, float"
    " global_scale, Tensor? column_scale, Tensor? bias, Tensor? residual, bool silu_mul) -> Tensor",
    _dense_linear,
    _linear_fake,
)

weight_linear = operator(
    "nvfp4_weight_linear(Tensor x, Tensor codes, Tensor scales, int outputs, bool native, float"
    " global_scale, Tensor? column_scale, Tensor? bias, Tensor? residual, bool silu_mul, bool"
    " batch_invariant) -> Tensor",
    _weight_linear,
    _linear_fake,
)


def nvfp4_weight_linear(
    x: Tensor,
    weight: PreparedWeight,
    global_scale: float,
    *,
    column_scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    silu_mul: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    """nvfp4_decode_linear for any number of rows. One operator, which chooses when it runs.

    Above MAX_DECODE_ROWS rows, the weight is dequantized, exactly, into a temporary tensor [N, K]
    of x's dtype, and torch multiplies. Global scale, column factors and bias come after the sum
    there too, but gate and up are rounded to x's dtype before silu · mul, and the result before a
    residual is added. batch_invariant always uses the decode kernel.
    """
    rest = (residual, silu_mul, batch_invariant)
    return weight_linear(x, *weight, global_scale, column_scale, bias, *rest)


def nvfp4_decode_linear(
    x: Tensor,
    weight: PreparedWeight,
    global_scale: float,
    *,
    column_scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    silu_mul: bool = False,
    batch_invariant: bool = False,
    division: Sequence[int] = (),
) -> Tensor:
    """x [..., K], bfloat16 or float16, times the weight: [..., N], or [..., N/2] with silu_mul.

    y = Σ_k x[k] · code[n, k] · scale[n, k/16] · global_scale · column_scale[n] + bias[n], summed in
    float32. With silu_mul the result is silu(y[n]) · y[n + N/2]. residual, of the result's shape,
    is added last, and the result is rounded once. K must be a multiple of 16, N of 8.
    Optimized for up to 64 rows. A row's result does not depend on the other rows while their number
    is within 1-4, 5-8, 9-16 or 17-32 (more are multiplied 32 at a time); with batch_invariant, for
    any number. division: (thread blocks of a cluster, phases of K), for tests and measurements.
    """
    return _decode(
        x,
        *weight,
        global_scale,
        column_scale,
        bias,
        residual,
        silu_mul,
        batch_invariant,
        list(division),
    )


def nvfp4_warpgroup_linear(
    x: Tensor,
    weight: PreparedWeight,
    global_scale: float,
    *,
    column_scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    silu_mul: bool = False,
    division: Sequence[int] = (),
) -> Tensor:
    """nvfp4_decode_linear for more rows. Compiled for SM90 alone.

    A row's result depends on the number of rows through its bucket (up to 32, 64, 128), and above
    128 through the number. division: (tokens of a tile, rows of a thread block, Sharing of
    warpgroup_form.h, thread blocks of a cluster), for tests and measurements.
    """
    rest = (residual, silu_mul, list(division))
    return _warpgroup(x, *weight, global_scale, column_scale, bias, *rest)


def nvfp4_dequantize_weight(weight: PreparedWeight, columns: int, like: Tensor) -> Tensor:
    """Codes times block scales, exactly: [N, K] with the dtype and device of `like`, without the
    global scale.

    For the experts of a layer (nvfp4_moe.weight.prepare_experts): [E, N, K].
    """
    return _dequantize(*weight, columns, like)

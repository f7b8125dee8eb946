"""nibble::e4m3_decode_linear: few rows of unquantized activations times an E4M3 weight in rows, on
NVIDIA GPUs.

The weight stays as the checkpoint has it, so that another kernel can multiply more rows by the same
tensor: docs/kernels/nvfp4_linear.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nibble_kernels.library import operator
from nibble_kernels.nvfp4_linear.reference import epilogue

__all__ = ["BLOCK", "E4m3Scales", "e4m3_decode_linear", "prepare_e4m3_scales"]

BLOCK = 128  # rows and columns of a block of scales; columns of a tile
GROUP = 8  # rows of a tile in each half of the weight
NAN = 0x7F
MAX_TILES = 1 << 21


class E4m3Scales(NamedTuple):
    """A weight is its code times both of these.

    tiles: float32 [groups, chunks, 2], of 8 rows of the upper half by 128 columns and of the 8 rows
    N/2 further down; columns: float32 [N] or none. A scale of the whole weight is in all tiles: as
    a number it would tell the graphs of a model's layers apart.
    """

    tiles: Tensor
    columns: Tensor | None


def prepare_e4m3_scales(
    weight: Tensor, scale: Tensor, *, block: tuple[int, int] | None = None
) -> E4m3Scales:
    """The scales of a weight, float8_e4m3fn [N, K] in rows, as the kernel reads them.

    scale, float32: one, or N, or with `block` [ceil(N / 128), ceil(K / 128)]. Raises ValueError for
    a weight that the kernel does not multiply: another layout, N that is not a multiple of 8 (with
    blocks: of 16) or K not of 16, other blocks, codes that are NaN.
    """
    if weight.ndim != 2 or weight.dtype != torch.float8_e4m3fn or not weight.is_contiguous():
        raise ValueError(f"expected contiguous float8_e4m3fn [N, K]; got {_described(weight)}")
    rows, columns = weight.shape
    multiple = GROUP if block is None else 2 * GROUP
    if rows % multiple or columns % 16 or not rows or not columns:
        raise ValueError(f"expected rows in {multiple}s and columns in 16s; got {rows} x {columns}")
    groups, chunks = -(-(rows // 2) // GROUP), -(-columns // BLOCK)
    if groups * chunks >= MAX_TILES:
        raise ValueError(f"a weight of {rows} x {columns} is too large")
    if weight.data_ptr() % 16:
        raise ValueError("the weight does not begin at a multiple of 16 bytes")
    for part in weight.view(torch.uint8).split(4096):  # the whole would be a temporary as large
        if ((part & NAN) == NAN).any():
            raise ValueError("a weight is NaN")
    scale = scale.detach().float()
    ones = scale.new_ones((groups, chunks, 2))
    if block is not None:
        return E4m3Scales(_of_tiles(scale, weight.shape, block), None)
    if scale.numel() == 1:
        return E4m3Scales(ones * scale.reshape(()), None)
    if scale.numel() == rows:
        return E4m3Scales(ones, scale.reshape(rows).contiguous())
    raise ValueError(f"{scale.numel()} scales do not fit a weight of {rows} x {columns}")


def _of_tiles(scale: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """[groups, chunks, 2]."""
    if tuple(block) != (BLOCK, BLOCK):
        raise ValueError(f"blocks of {block[0]} x {block[1]} are not supported; expected 128 x 128")
    expected = tuple(-(-size // BLOCK) for size in shape)
    if scale.shape != expected:
        raise ValueError(f"expected scales {expected}; got {tuple(scale.shape)}")
    of_groups = scale.repeat_interleave(BLOCK // GROUP, 0)[: shape[0] // GROUP]
    return of_groups.unflatten(0, (2, -1)).permute(1, 2, 0).contiguous()


def _described(weight: Tensor) -> str:
    layout = "" if weight.is_contiguous() else " in another layout"
    return f"{weight.dtype} {list(weight.shape)}{layout}"


def _reference(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    column_scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    silu_mul: bool,
    division: Sequence[int],
) -> Tensor:
    """The specification: float32 throughout, rounded once at the end."""
    rows, columns = weight.shape
    of_rows = scales.permute(2, 0, 1).repeat_interleave(GROUP, 1)[:, : rows // 2].flatten(0, 1)
    factors = of_rows.repeat_interleave(BLOCK, 1)[:, :columns]
    y = x.reshape(-1, columns).float() @ (weight.float() * factors).T
    y = epilogue(y, column_scale, bias, silu_mul).unflatten(0, x.shape[:-1])
    if residual is not None:
        y = y + residual.float()
    return y.to(x.dtype)


_decode = operator(
    "e4m3_decode_linear(Tensor x, Tensor weight, Tensor scales, Tensor? column_scale,"
    " Tensor? bias, Tensor? residual, bool silu_mul, int[] division) -> Tensor",
    _reference,
    lambda x, weight, scales, column_scale, bias, residual, silu_mul, division: x.new_empty(
        (*x.shape[:-1], len(weight) // (2 if silu_mul else 1))
    ),
)


def e4m3_decode_linear(
    x: Tensor,
    weight: Tensor,
    scales: E4m3Scales,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    silu_mul: bool = False,
    division: Sequence[int] = (),
) -> Tensor:
    """x [..., K], bfloat16, times the transposed weight, float8_e4m3fn [N, K]: [..., N], or
    [..., N/2] with silu_mul.

    y = Σ_k x[k] · code[n, k] · tile scale[n, k] · column scale[n] + bias[n], summed
    in float32. With silu_mul the result is silu(y[n]) · y[n + N/2]. residual, of the result's
    shape, is added last, and the result is rounded once. `scales` are those of prepare_e4m3_scales.
    Made for up to 32 rows; more are multiplied 32 at a time. A row's result does not depend on the
    other rows while their number is within 1-4, 5-8, 9-16 or 17-32. division: (thread blocks of a
    cluster, phases of K), for tests and measurements.
    """
    rest = (bias, residual, silu_mul, list(division))
    return _decode(x, weight, scales.tiles, scales.columns, *rest)

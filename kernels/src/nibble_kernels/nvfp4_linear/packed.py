"""An NVFP4 weight as the CPU's products read it: 16 rows side by side, as many bytes as before.

codes[tile, block] are 16 rows by 16 columns: two halves of 8 columns, and in a half four bytes of
each row, the codes of its even columns before those of its odd ones. So one register has the same
columns of 16 rows, and no sum crosses its lanes. scales[tile, block] are those of the 16 rows. Rows
that fill up the last tile are zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nibble_kernels.conversions.reference import unpack
from nibble_kernels.library import operator
from nibble_kernels.nvfp4_linear import check_factors, check_weight, reference
from nibble_kernels.scale_layout import BLOCK

__all__ = ["PackedWeight", "nvfp4_packed_linear", "pack_weight", "stored_weight"]

ROWS = 16  # of a tile
HALF = 8  # columns
NAN = 0x7F


class PackedWeight(NamedTuple):
    """codes uint8 [tiles, blocks, 128] and scales float8_e4m3fn [tiles, blocks, 16] of a weight of
    `rows` rows.
    """

    codes: Tensor
    scales: Tensor
    rows: int


def _pack_reference(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    rows = len(codes)
    padding = (0, 0, 0, -rows % ROWS)
    by_column = unpack(torch.nn.functional.pad(codes, padding)).unflatten(0, (-1, ROWS))
    # [tile, row, block, half, column / 2, odd] to [tile, block, half, row, odd, column / 2]
    halves = by_column.unflatten(2, (-1, 2, HALF // 2, 2)).permute(0, 2, 3, 1, 5, 4)
    pairs = halves.reshape(*halves.shape[:2], -1, 2)
    stored = torch.nn.functional.pad(scales.view(torch.uint8), padding).unflatten(0, (-1, ROWS))
    return (
        (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8).contiguous(),
        stored.transpose(1, 2).contiguous().view(torch.float8_e4m3fn),
    )


def _unpack_reference(codes: Tensor, scales: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    halves = unpack(codes).view(*codes.shape[:2], 2, ROWS, 2, HALF // 2)
    by_row = halves.permute(0, 3, 1, 2, 5, 4).reshape(len(codes) * ROWS, -1, 2)
    stored = scales.view(torch.uint8).transpose(1, 2).flatten(0, 1)
    return (
        (by_row[:rows, :, 0] | by_row[:rows, :, 1] << 4).to(torch.uint8).contiguous(),
        stored[:rows].contiguous().view(torch.float8_e4m3fn),
    )


_pack = operator(
    "nvfp4_pack(Tensor codes, Tensor scales) -> (Tensor, Tensor)",
    _pack_reference,
    lambda codes, scales: (
        codes.new_empty((-(-len(codes) // ROWS), scales.shape[1], ROWS * BLOCK // 2)),
        scales.new_empty((-(-len(codes) // ROWS), scales.shape[1], ROWS)),
    ),
)
_unpack = operator(
    "nvfp4_unpack(Tensor codes, Tensor scales, int rows) -> (Tensor, Tensor)",
    _unpack_reference,
    lambda codes, scales, rows: (
        codes.new_empty((rows, codes.shape[1] * BLOCK // 2)),
        scales.new_empty((rows, scales.shape[1])),
    ),
)
_packed_linear = operator(
    "nvfp4_packed_linear(Tensor x, Tensor codes, Tensor scales, int rows, Tensor global_scale,"
    " Tensor? column_scale, Tensor? bias, Tensor? input_scale_inv) -> Tensor",
    lambda x, codes, scales, rows, *factors: reference.nvfp4_linear(
        x, *_unpack_reference(codes, scales, rows), *factors
    ),
    lambda x, codes, scales, rows, *factors: x.new_empty((*x.shape[:-1], rows)),
)


def pack_weight(codes: Tensor, scales: Tensor) -> PackedWeight:
    """Codes uint8 [N, K/2] with scales float8_e4m3fn [N, K/16], in new tensors.

    Raises ValueError for other types or shapes, and where a scale is NaN.
    """
    check_weight(2 * codes.shape[-1], codes, scales, "weight")
    if ((scales.view(torch.uint8) & NAN) == NAN).any():
        raise ValueError("a block scale is NaN")
    packed, packed_scales = _pack(codes, scales)
    return PackedWeight(packed, packed_scales, len(codes))


def stored_weight(weight: PackedWeight) -> tuple[Tensor, Tensor]:
    """The codes and scales that pack_weight was given."""
    return _unpack(*weight)


def nvfp4_packed_linear(
    x: Tensor,
    weight: PackedWeight,
    global_scale: Tensor,
    *,
    column_scale: Tensor | None = None,
    bias: Tensor | None = None,
    input_scale_inv: Tensor | None = None,
) -> Tensor:
    """nvfp4_linear with a packed weight: the same bits."""
    codes, scales, rows = weight
    if codes.ndim != 3 or x.shape[-1] != codes.shape[1] * BLOCK or -(-rows // ROWS) != len(codes):
        raise ValueError(
            f"a packed weight of {rows} rows must be codes [{-(-rows // ROWS)},"
            f" {x.shape[-1] // BLOCK}, {ROWS * BLOCK // 2}] for rows of {x.shape[-1]}; got"
            f" {list(codes.shape)}"
        )
    check_factors(rows, global_scale, column_scale, bias, input_scale_inv)
    return _packed_linear(x, codes, scales, rows, global_scale, column_scale, bias, input_scale_inv)

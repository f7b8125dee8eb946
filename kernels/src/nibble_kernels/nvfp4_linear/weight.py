"""The layout of an NVFP4 weight for the CUDA kernels: tiles, with the same number of bytes except
for padding.

A tile has 128 columns (a chunk) of 16 rows (a group): 8 rows of the weight's upper half, and the 8
rows of the lower half that are N / 2 rows further down. A lane of a warp has 32 columns of row r
and of row r + N / 2, as 16 bytes of codes each, and their four scales, side by side.
codes[group, chunk, half, lane] are the codes of row 8 group + lane // 4 of the half, from column
128 chunk + 32 (lane % 4).

"Native" codes have the checkpoint's order within a word, for instructions that convert E2M1 and for
float16. "Shifted" codes have an order from which few operations give bfloat16 (`BfloatOperand` in
mma_operand.cuh): PAIR_BITS has the position of each pair of columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nibble_kernels.nvfp4_linear import check_weight
from nibble_kernels.scale_layout import BLOCK

GROUP = 8  # rows of each half
QUARTERS = 4  # of a chunk; a lane has the columns of one quarter
CHUNK_BLOCKS = 8
ONE = 0x38  # 1.0 as E4M3
SIGN = 0x80
# Positions in a word of the four bits of a code, least significant first, for the even columns of
# pairs 0 to 3. Those of the odd column are 16 bits further, modulo 32.
PAIR_BITS = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (29, 30, 26, 27))


class PreparedWeight(NamedTuple):
    """A weight of `rows` rows in the layout of this module.

    codes: uint8 [groups, chunks, 2, 32, 16]; scales: uint8 [groups, chunks, 32, 4].
    """

    codes: Tensor
    scales: Tensor
    rows: int
    native: bool


def wants_native(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether native codes are faster for activations of `dtype`. NVIDIA GPUs have instructions for
    E2M1 since SM100.
    """
    return dtype != torch.bfloat16 or (
        device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)
    )


def prepare_weight(codes: Tensor, scales: Tensor, native: bool) -> PreparedWeight:
    """Rearrange codes, uint8 [N, K/2], and scales, float8_e4m3fn [N, K/16], into new tensors.

    Weights of one shape may come together: [E, N, K/2] with [E, N, K/16] give tensors with a first
    dimension E. N must be a multiple of 8. Scales become positive without a change of the products:
    the codes of a negative scale get opposite signs, and those of a zero scale become zero with a
    scale of one.
    Raises ValueError for other dtypes or shapes, and for a scale that is NaN.
    """
    check_weight(2 * codes.shape[-1], codes, scales, "weight")
    rows = codes.shape[-2]
    if rows % GROUP:
        raise ValueError(f"a weight must have a multiple of {GROUP} rows; got {rows}")
    stored = scales.view(torch.uint8)
    if ((stored & ~SIGN & 0xFF) == 0x7F).any():
        raise ValueError("a block scale is NaN")
    codes, stored = _with_positive_scales(codes, stored)
    # Dimensions: half, group, row, chunk, quarter, bytes of a lane.
    by_lane = _padded(codes, BLOCK // 2, 0).unflatten(-1, (-1, QUARTERS, BLOCK))
    scales_by_lane = _padded(stored, 1, ONE).unflatten(-1, (-1, QUARTERS, 2))
    tiles = _permuted(by_lane, 1, 3, 0, 2, 4, 5).flatten(-3, -2).contiguous()
    scale_tiles = _permuted(scales_by_lane, 1, 3, 2, 4, 0, 5).flatten(-2).flatten(-3, -2)
    tiles = tiles if native else shifted(tiles)
    return PreparedWeight(tiles, scale_tiles.contiguous(), rows, native)


def stored_weight(weight: PreparedWeight, columns: int) -> tuple[Tensor, Tensor]:
    """The codes, uint8 [N, K/2], and scales, float8_e4m3fn [N, K/16], of a prepared weight, row by
    row.
    """
    codes, scales, rows, native = weight
    codes = codes if native else shifted_back(codes)
    by_row = (
        codes.unflatten(3, (GROUP, QUARTERS)).permute(2, 0, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    )
    scale_by_row = (
        scales.unflatten(3, (2, 2)).unflatten(2, (GROUP, QUARTERS)).permute(4, 0, 2, 1, 3, 5)
    )
    scale_by_row = scale_by_row.flatten(3).flatten(1, 2)
    return (
        by_row[:, : rows // 2, : columns // 2].reshape(rows, columns // 2),
        scale_by_row[:, : rows // 2, : columns // BLOCK]
        .reshape(rows, columns // BLOCK)
        .view(torch.float8_e4m3fn),
    )


def shifted(codes: Tensor) -> Tensor:
    words = codes.view(torch.int32)
    shifted = torch.zeros_like(words)
    for bit, place in _places():
        shifted |= (words >> bit & 1) << place
    return shifted.view(torch.uint8)


def shifted_back(codes: Tensor) -> Tensor:
    words = codes.view(torch.int32)
    native = torch.zeros_like(words)
    for bit, place in _places():
        native |= (words >> place & 1) << bit
    return native.view(torch.uint8)


def _places() -> list[tuple[int, int]]:
    """(bit in a word of native codes, bit in a word of shifted codes) for all bits."""
    return [
        (4 * column + bit, (place + column % 2 * 16) % 32)
        for column in range(8)
        for bit, place in enumerate(PAIR_BITS[column // 2])
    ]


def _padded(values: Tensor, each: int, fill: int) -> Tensor:
    """[…, N, blocks · each] as […, 2, groups, GROUP, chunks · CHUNK_BLOCKS · each]."""
    *outer, rows, width = values.shape
    groups, chunks = -(-rows // 2 // GROUP), -(-width // each // CHUNK_BLOCKS)
    padded = values.new_full((*outer, 2, groups * GROUP, chunks * CHUNK_BLOCKS * each), fill)
    padded[..., : rows // 2, :width] = values.unflatten(-2, (2, rows // 2))
    return padded.unflatten(-2, (groups, GROUP))


def _permuted(values: Tensor, *dims: int) -> Tensor:
    """The last len(dims) dimensions in this order."""
    outer = values.ndim - len(dims)
    return values.permute(*range(outer), *(outer + dim for dim in dims))


def _with_positive_scales(codes: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    magnitudes = stored & 0x7F
    negative, zero = stored > magnitudes, magnitudes == 0
    if negative.any() or zero.any():
        by_block = codes.unflatten(-1, (-1, BLOCK // 2))
        # 0x88: the signs of both codes of a byte.
        by_block = by_block ^ (negative * 0x88).to(torch.uint8)[..., None]
        codes = by_block.masked_fill(zero[..., None], 0).flatten(-2)
    return codes, torch.where(zero, ONE, magnitudes).to(torch.uint8)

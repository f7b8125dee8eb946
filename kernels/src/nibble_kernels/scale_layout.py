"""Layouts of block scales: row by row ("linear"), or in the 128x4 tiles that FP4 tensor cores read
("tiled").

Tiled scales are padded to a multiple of 128 rows and 4 blocks. The offset of the scale of
(row, block) is (cuBLAS 13 documentation, 1D block scaling factors layout):

    (row // 128 * (blocks / 4) + block // 4) * 512 + row % 32 * 16 + row // 32 % 4 * 4 + block % 4
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16  # elements that share a scale


def round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


def tiled_shape(rows: int, blocks: int) -> tuple[int, int]:
    """The shape of the tiled scales of `rows` rows of `blocks` blocks. Elements are not in row
    order.
    """
    return round_up(rows, 128), round_up(blocks, 4)


def tile(scales: Tensor) -> Tensor:
    """Tiled scales, padded with zeros, from linear ones [rows, blocks] of one byte each."""
    rows, blocks = scales.shape
    padded_rows, padded_blocks = tiled_shape(rows, blocks)
    padding = (0, padded_blocks - blocks, 0, padded_rows - rows)
    padded = torch.nn.functional.pad(scales.view(torch.uint8), padding)
    # Dimensions: tile row, row // 32, row % 32, tile, block.
    tiles = padded.view(padded_rows // 128, 4, 32, padded_blocks // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(padded_rows, padded_blocks).view(scales.dtype)


def untile(tiled: Tensor, rows: int, blocks: int) -> Tensor:
    """Linear scales [rows, blocks] from tiled ones."""
    padded_rows, padded_blocks = tiled_shape(rows, blocks)
    tiles = tiled.view(torch.uint8).view(padded_rows // 128, padded_blocks // 4, 32, 4, 4)
    linear = tiles.permute(0, 3, 2, 1, 4).reshape(padded_rows, padded_blocks)
    return linear[:rows, :blocks].contiguous().view(tiled.dtype)

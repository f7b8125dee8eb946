"""An NVFP4 weight as the CUDA kernels read it: codes where the checkpoint has them, scales in the order of their use.

A lane of a warp multiplies 32 columns of row r and of row r + N / 2 at a time, with four scales, which lie together:
scales[group, chunk, lane] = those of rows (8 group + lane // 4) of the upper and of the lower half, blocks 8 chunk +
2 (lane % 4) and the next. They are as many bytes as before, but for padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nibble_kernels.nvfp4_linear import check_weight
from nibble_kernels.scale_layout import BLOCK, round_up

GROUP = 8  # rows of either half
CHUNK_BLOCKS = 8
ONE = 0x38  # 1.0 as E4M3
SIGN = 0x80


class PreparedWeight(NamedTuple):
    """codes uint8 [N, K/2], scales uint8 [groups, chunks, 32, 4], arrivals int32 [groups], zero between products."""

    codes: Tensor
    scales: Tensor
    arrivals: Tensor


def prepare_weight(codes: Tensor, scales: Tensor) -> PreparedWeight:
    """Codes uint8 [N, K/2], kept and changed in place, with scales float8_e4m3fn [N, K/16]; N must be a multiple of 8.

    Scales become positive, which changes no product: a negative scale changes the signs of its codes, and codes under a scale
    of zero become zero under a scale of one. Raises ValueError for other types or shapes, and where a scale is NaN.
    """
    check_weight(2 * codes.shape[-1], codes, scales, "weight")
    rows, blocks = scales.shape
    if rows % GROUP:
        raise ValueError(f"a weight must have a multiple of {GROUP} rows; got {rows}")
    stored = scales.view(torch.uint8)
    if ((stored & ~SIGN & 0xFF) == 0x7F).any():
        raise ValueError("a block scale is NaN")
    stored = _make_positive(codes, stored)
    groups, chunks = -(-rows // 2 // GROUP), -(-blocks // CHUNK_BLOCKS)
    padded = stored.new_full((2, groups * GROUP, round_up(blocks, CHUNK_BLOCKS)), ONE)
    padded[:, : rows // 2, :blocks] = stored.view(2, rows // 2, blocks)
    by_lane = padded.view(2, groups, GROUP, chunks, 4, 2).permute(1, 3, 2, 4, 0, 5)
    arrivals = torch.zeros(groups, dtype=torch.int32, device=codes.device)
    return PreparedWeight(codes, by_lane.reshape(groups, chunks, 4 * GROUP, 4), arrivals)


def stored_scales(scales: Tensor, rows: int, blocks: int) -> Tensor:
    """The scales of a prepared weight row by row, float8_e4m3fn [rows, blocks]."""
    groups, chunks = scales.shape[:2]
    by_row = (
        scales.view(groups, chunks, GROUP, 4, 2, 2).permute(4, 0, 2, 1, 3, 5).reshape(2, groups * GROUP, -1)
    )
    return by_row[:, : rows // 2, :blocks].reshape(rows, blocks).view(torch.float8_e4m3fn)


def _make_positive(codes: Tensor, stored: Tensor) -> Tensor:
    magnitudes = stored & 0x7F
    negative, zero = stored > magnitudes, magnitudes == 0
    if negative.any() or zero.any():
        by_block = codes.view(*stored.shape, BLOCK // 2)
        by_block ^= (negative * 0x88).to(torch.uint8)[..., None]  # the signs of both codes of a byte
        by_block[zero] = 0
    return torch.where(zero, ONE, magnitudes).to(torch.uint8)

"""The layout of a 2:4 sparse NVFP4 weight: 7/9 of the dense one's bytes, without losing a bit.

Of four neighbouring columns of a row at most two are not zero; these are stored, with four bits
that say which. The tiles are those of nvfp4_linear/weight.py (8 rows of the upper half, 8 of the
lower, 128 columns), and so are the scales. A lane has 8 bytes of codes for each of its two rows.
places[group, chunk, lane] are two words for the sparse tensor core product: word w of lane 4 q + c
has the fours 4 w + c of all four quarters, of row q in its low half and of the lower half's in the
high one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nibble_kernels.nvfp4_linear.weight import (
    PreparedWeight,
    prepare_weight,
    shifted,
    shifted_back,
    stored_weight,
)


class NotSparseError(ValueError):
    """A weight is not 2:4 sparse. share: of its groups of four columns, those with more than two
    that are not zero.
    """

    def __init__(self, share: float) -> None:
        super().__init__(
            f"the weight is not 2:4 sparse: {share:.2%} of its groups of four have more than two"
            " codes that are not zero. Expected none. Use the dense weight."
        )
        self.share = share


class SparseWeight(NamedTuple):
    """codes: uint8 [groups, chunks, 32, 16]; places: uint8 [groups, chunks, 32, 8]; scales: uint8
    [groups, chunks, 32, 4].
    """

    codes: Tensor
    places: Tensor
    scales: Tensor
    rows: int
    native: bool


def share_that_is_not_sparse(codes: Tensor) -> float:
    """Of the groups of four columns of codes, uint8 [N, K/2], those with more than two that are not
    zero.
    """
    is_stored = _fours(codes) & 7 != 0
    return (is_stored.sum(-1) > 2).double().mean().item()


def pack_sparse(codes: Tensor, scales: Tensor, native: bool) -> SparseWeight:
    """Pack codes, uint8 [N, K/2], and scales, float8_e4m3fn [N, K/16], into new tensors.

    The products are those of the dense weight; a negative zero may become a zero. native: for
    float16 activations, else for bfloat16. Raises NotSparseError where the weight is not 2:4
    sparse, and ValueError for what prepare_weight refuses.
    """
    dense = prepare_weight(codes, scales, native=True)
    fours = _fours(dense.codes)  # [groups, chunks, half, lane, 8, 4]
    is_stored = fours & 7 != 0
    if (is_stored.sum(-1) > 2).any():
        raise NotSparseError(share_that_is_not_sparse(codes))
    # Those that are not zero first, then others: two, in the order of columns.
    first = torch.sort((~is_stored).to(torch.uint8), dim=-1, stable=True).indices[..., :2]
    places = first.sort(-1).values
    stored = fours.gather(-1, places)
    stored = stored.masked_fill(stored & 7 == 0, 0)
    by_lane = (stored[..., 0] | stored[..., 1] << 4).transpose(2, 3).flatten(-2).contiguous()
    bits = (places[..., 0] | places[..., 1] << 2).to(torch.uint8)
    return SparseWeight(
        by_lane if native else shifted(by_lane),
        _places_in_lanes(bits),
        dense.scales,
        dense.rows,
        native,
    )


def dense_weight(weight: SparseWeight, columns: int) -> tuple[Tensor, Tensor]:
    """The codes, uint8 [N, K/2], and scales, float8_e4m3fn [N, K/16], that a weight stands for."""
    packed = weight.codes if weight.native else shifted_back(weight.codes)
    by_half = packed.unflatten(-1, (2, 8)).transpose(2, 3)
    stored = torch.stack((by_half & 15, by_half >> 4), -1)
    bits = _places_of_lanes(weight.places)
    places = torch.stack((bits & 3, bits >> 2), -1).long()
    fours = stored.new_zeros((*bits.shape, 4)).scatter_(-1, places, stored)
    nibbles = fours.flatten(-2).unflatten(-1, (-1, 2))
    codes = nibbles[..., 0] | nibbles[..., 1] << 4
    return stored_weight(PreparedWeight(codes, weight.scales, weight.rows, True), columns)


def _fours(codes: Tensor) -> Tensor:
    """Codes, two a byte, as [..., groups of four, 4]."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2).unflatten(-1, (-1, 4))


def _places_in_lanes(bits: Tensor) -> Tensor:
    """Four bits [groups, chunks, half, lane, 8] as uint8 [groups, chunks, lane, 8]."""
    # Dimensions: half, row, pair of quarters, quarter, word, lane of the row.
    apart = bits.unflatten(-1, (2, 4)).unflatten(3, (8, 2, 2))
    pairs = apart[:, :, :, :, :, 0] | apart[:, :, :, :, :, 1] << 4
    return pairs.permute(0, 1, 3, 6, 5, 2, 4).flatten(4).flatten(2, 3).contiguous()


def _places_of_lanes(places: Tensor) -> Tensor:
    apart = places.unflatten(2, (8, 4)).unflatten(-1, (2, 2, 2)).permute(0, 1, 5, 2, 6, 4, 3)
    quarters = torch.stack((apart & 15, apart >> 4), 5)
    return quarters.flatten(-2).flatten(3, 5)

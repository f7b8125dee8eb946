"""Checks that block scales have the layout of their label: row by row, or in 128x4 tiles.

Both take the same bytes, so a reader of the wrong one computes with permuted scales and no error.
Three tests, two of them on the first rows of some tensors:

Four-over-six: a block scaled to 4 has no code of 6, and only such blocks have scales above 256. In
the right layout that holds for every block with such a scale, in the wrong one for about half.

The largest product, of a CloverLM: four-over-six gives the block with the largest weight the code 6
and the scale 256, or 4 and 384, so code times scale is 1536 somewhere and nowhere more. This reads
all of every tensor; one block decides.

Rows and columns: weights differ in size by output and by input channel. In the right layout the
variances of the rows' means and of the columns' means of log2(scale), both without the noise of
averaging, have the largest sum; the wrong layout mixes them. The rows' variance alone is larger in
the wrong layout if heads or blocks of input channels differ.

Random weights without such structure pass undecided: nibble refuses nothing on weak evidence.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pvariance
from typing import Literal

from nibble.checkpoint.nvfp4 import (
    GROUP_SIZE,
    TILE_COLUMNS,
    TILE_ROWS,
    Nvfp4Weight,
    Problem,
    gather,
)
from nibble.checkpoint.scale_values import TensorFiles, e4m3_value
from nibble.errors import ExitCode

MAX_BYTES = 128 << 10  # of the scales of one tensor, but at least 128 rows
MAX_TENSORS = 16
TILE_BYTES = TILE_ROWS * TILE_COLUMNS
ABOVE_256 = re.compile(rb"[\x79-\x7e]")  # E4M3
MIN_BLOCKS, MAX_BLOCKS = 16, 256  # for the test of four-over-six
LARGEST = 1536.0  # code times scale
FROM_256 = range(0x78, 0x7F)  # E4M3; a smaller scale times 6 is below LARGEST
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Of the two in a byte, without sign
LARGER_CODE = bytes(max(pair & 7, pair >> 4 & 7) for pair in range(256))
ZERO_CODES = b"\x00\x08\x80\x88"
MIN_EFFECT = 0.003  # octaves squared
MIN_RATIO = 3.0

Verdict = Literal["right", "wrong", "unclear"]


@dataclass(frozen=True)
class LayoutCheck:
    """How many tensors were checked, how many match their label or not, and the problem if any."""

    tensors: int
    right: int
    wrong: int
    problem: Problem | None


def check_layout(
    folder: Path, weights: Iterable[Nvfp4Weight], is_cloverlm: bool = False
) -> LayoutCheck:
    """Check up to 16 tensors of the checkpoint. A problem needs two wrong tensors and no correct
    one.

    In a packed CloverLM it checks every tensor, and one wrong tensor is a problem.
    """
    weights = list(weights)
    if is_cloverlm and any(weight.layout == "quartet2" for weight in weights):
        return _check_products(folder, weights)
    candidates = [
        weight
        for weight in weights
        if weight.scale is not None and weight.tiles_evenly and not weight.experts
    ]
    step = max(1, len(candidates) // MAX_TENSORS)
    chosen = candidates[::step][:MAX_TENSORS]
    with TensorFiles(folder) as files:
        verdicts = [_verdict(files, weight) for weight in chosen]
    right, wrong = verdicts.count("right"), verdicts.count("wrong")
    problem = None
    if wrong >= 2 and not right:
        problem = _problem(chosen[verdicts.index("wrong")], wrong - 1)
    return LayoutCheck(len(chosen), right, wrong, problem)


def _check_products(folder: Path, weights: Sequence[Nvfp4Weight]) -> LayoutCheck:
    """Check packed weights of CloverLM by their largest products."""
    with TensorFiles(folder) as files:
        found = [_by_product(files, weight) for weight in weights if weight.scale is not None]
    problems = gather(problem for problem in found if isinstance(problem, Problem))
    wrong = sum(1 + problem.others for problem in problems)
    return LayoutCheck(len(found), found.count("right"), wrong, problems[0] if problems else None)


def _by_product(files: TensorFiles, weight: Nvfp4Weight) -> Verdict | Problem:
    """The layout by the largest product. Scales that are wrong in both layouts are damaged; zeros
    show nothing.
    """
    assert weight.scale is not None
    if not weight.tiles_evenly:
        what, expected = (
            f"is [{weight.rows}, {weight.columns}]",
            "whole 128x4 tiles of scales: multiples of 128 and 64",
        )
        return Problem(
            "tiles", ExitCode.CONFIG, weight.weight.name, weight.weight.file, what, expected
        )
    blocks = weight.columns // GROUP_SIZE
    if weight.scale.nbytes != weight.rows * blocks:  # the header check reports it
        return "unclear"
    stored = files.read(weight.scale, 0, weight.scale.nbytes)
    codes = files.read(weight.weight, 0, weight.weight.nbytes)
    largest = _largest_product(stored, codes, lambda index: _tiled_block(index, blocks))
    if largest == LARGEST:
        return "right"
    if _largest_product(stored, codes, lambda index: index) == LARGEST:
        return _problem(weight, 0)
    if not largest and not (stored.strip(b"\0") and codes.translate(None, ZERO_CODES)):
        return "unclear"
    what = f"has {largest:g}" if largest > LARGEST else "has less than 1536"
    return Problem(
        "product",
        ExitCode.MODEL,
        weight.scale.name,
        weight.scale.file,
        f"{what} as its largest code times scale",
        "1536, as Quartet II makes it",
    )


def _largest_product(stored: bytes, codes: bytes, block_of: Callable[[int], int]) -> float:
    """The largest code times scale of blocks with scales from 256 up; `block_of` is the block
    that a scale belongs to.
    """
    largest = 0.0
    for byte in FROM_256:
        index = stored.find(byte)
        while index >= 0:
            start = block_of(index) * GROUP_SIZE // 2
            code = max(codes[start : start + GROUP_SIZE // 2].translate(LARGER_CODE))
            largest = max(largest, MAGNITUDES[code] * e4m3_value(byte))
            index = stored.find(byte, index + 1)
    return largest


def _problem(weight: Nvfp4Weight, others: int) -> Problem:
    rows, tiles = "row by row", "in 128x4 tiles"
    stored, promised = (rows, tiles) if weight.layout == "quartet2" else (tiles, rows)
    assert weight.scale is not None
    what = f"holds its scales {stored}, by their values"
    return Problem("layout", ExitCode.CONFIG, weight.scale.name, weight.scale.file, what,
                   f"scales {promised}, as its config says", weight.is_draft, others)  # fmt: skip


def _verdict(files: TensorFiles, weight: Nvfp4Weight) -> Verdict:
    assert weight.scale is not None
    blocks = weight.columns // GROUP_SIZE
    rows = min(weight.rows, max(1, MAX_BYTES // (TILE_ROWS * blocks)) * TILE_ROWS)
    stored = files.read(weight.scale, 0, rows * blocks)
    linear_is_right = weight.layout != "quartet2"
    as_linear, as_tiled = _four_over_six(files, weight, stored)
    if as_linear is not None and as_tiled is not None and max(as_linear, as_tiled) == 1.0:
        if min(as_linear, as_tiled) < 0.9:
            return "right" if (as_linear == 1.0) == linear_is_right else "wrong"
        return "unclear"
    linear, tiled = effect(stored, blocks), effect(untile(stored, blocks), blocks)
    labelled, other = (linear, tiled) if linear_is_right else (tiled, linear)
    if other > MIN_EFFECT and other > MIN_RATIO * labelled:
        return "wrong"
    return "right" if labelled > MIN_EFFECT and labelled > MIN_RATIO * other else "unclear"


def untile(stored: bytes, blocks: int) -> bytes:
    """Row-major scales [rows, blocks] from tiled ones of whole tiles."""
    linear = bytearray(len(stored))
    tiles_across = blocks // TILE_COLUMNS
    for tile in range(len(stored) // TILE_BYTES):
        data = stored[tile * TILE_BYTES : (tile + 1) * TILE_BYTES]
        first = (tile // tiles_across) * TILE_ROWS * blocks + (tile % tiles_across) * TILE_COLUMNS
        for part in range(16):  # 32 rows apart by quarter, one column
            start = first + (part // 4) * 32 * blocks + part % 4
            linear[start : start + 31 * blocks + 1 : blocks] = data[part::16]
    return bytes(linear)


def effect(scales: bytes, blocks: int) -> float:
    """Variance of row means plus that of column means of log2(scale), in octaves squared, without
    the part that noise alone causes.

    An E4M3 byte is log2 of its value times 8 and a constant, within 0.09 octaves.
    """
    rows = len(scales) // blocks
    by_row = pvariance(_means([scales[row * blocks : (row + 1) * blocks] for row in range(rows)]))
    by_column = pvariance(_means([scales[column::blocks] for column in range(blocks)]))
    noise = _variance(scales) * (1 / rows + 1 / blocks)
    return (by_row + by_column - noise) / 64


def _means(parts: Sequence[bytes]) -> list[float]:
    return [sum(part) / len(part) for part in parts]


def _variance(scales: bytes) -> float:
    counted = Counter(scales[:: max(1, len(scales) >> 16)])
    mean = fmean(counted.keys(), counted.values())
    return fmean([(byte - mean) ** 2 for byte in counted], counted.values())


def _four_over_six(
    files: TensorFiles, weight: Nvfp4Weight, stored: bytes
) -> tuple[float, float] | tuple[None, None]:
    """How many blocks with a scale above 256 have 4 as their largest code: read row by row, and
    read in tiles.
    """
    large = [match.start() for match in ABOVE_256.finditer(stored)]
    if len(large) < MIN_BLOCKS:
        return None, None
    large = large[:: -(-len(large) // MAX_BLOCKS)]
    blocks = weight.columns // GROUP_SIZE
    places = (
        [divmod(index, blocks) for index in large],
        [_tiled_place(index, blocks) for index in large],
    )
    linear, tiled = (
        sum(_is_four(files, weight, *place) for place in listed) / len(large) for listed in places
    )
    return linear, tiled


def _tiled_block(index: int, blocks: int) -> int:
    """The row-major block number of a byte of tiled scales."""
    row, block = _tiled_place(index, blocks)
    return row * blocks + block


def _tiled_place(index: int, blocks: int) -> tuple[int, int]:
    """(row, block) of a byte of tiled scales."""
    tile, inside = divmod(index, TILE_BYTES)
    down, across = divmod(tile, blocks // TILE_COLUMNS)
    low, rest = divmod(inside, 16)
    return down * TILE_ROWS + rest // 4 * 32 + low, across * TILE_COLUMNS + rest % 4


def _is_four(files: TensorFiles, weight: Nvfp4Weight, row: int, block: int) -> bool:
    start = row * weight.columns // 2 + block * GROUP_SIZE // 2
    codes = files.read(weight.weight, start, start + GROUP_SIZE // 2)
    return max(max(byte & 7, byte >> 4 & 7) for byte in codes) == 6  # the index of 4 in E2M1

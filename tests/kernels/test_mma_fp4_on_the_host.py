"""The emulation of SM12x's FP4 products (nibble/mma_fp4.cuh) against PTX's definition of their
fragments, written here without the header's code. Runs on the host, lane by lane.

Products and sums are exact in float32 where block scales are powers of two near each other, so the
results must be equal. With any scales they may differ by the rounding of the additions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.support.changes import OPERATORS
from tests.support.kernels.emulated import compile_on_the_host, needs_compiler, pointers

pytestmark = [needs_compiler, pytest.mark.when_changed(*OPERATORS)]

Multiply = Callable[..., Tensor]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()
LANES = [(lane // 4, lane % 4) for lane in range(32)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_on_the_host("mma_fp4.cpp", tmp_path_factory.mktemp("emulator"))


def words(nibbles: list[int]) -> int:
    return sum(code << 4 * i for i, code in enumerate(nibbles))


def registers(rows: list[list[int]]) -> Tensor:
    """[lanes, registers] as int32 with these bits."""
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def scales_of(kind: str, rows: int, generator: torch.Generator) -> Tensor:
    """E4M3 bytes [rows, 4]: 1/4 to 8, or any that are not NaN."""
    if kind == "powers of two":
        return (torch.randint(5, 11, (rows, 4), generator=generator) << 3).to(torch.uint8)
    return torch.randint(0, 127, (rows, 4), generator=generator, dtype=torch.uint8)


def in_lanes(scales: Tensor, lane_of: Callable[[int], int], noise: Tensor) -> Tensor:
    """The four bytes of each row in its lane, anything in the others."""
    found = noise.clone()
    for row, scale in enumerate(scales.tolist()):
        found[lane_of(row)] = int.from_bytes(bytes(scale), "little", signed=True)
    return found


def row_lane(row: int, selector: int) -> int:
    return row % 8 * 4 + 2 * selector + row // 8


@pytest.mark.parametrize("kind", ["powers of two", "any scales"])
@pytest.mark.parametrize("selectors", [(0, 0), (1, 3)])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_products_are_as_ptx_defines_them(
    library: ctypes.CDLL, kind: str, selectors: tuple[int, int], sparse: bool
) -> None:
    for seed in range(5):
        operands, exact, size = a_tile(seed, kind, selectors, sparse, start=True)
        found = sums_in_lanes(start_of(seed))
        library.multiply_fp4_on_the_host(
            sparse, int(selectors == (1, 3)), *pointers(*operands, found)
        )
        if kind == "powers of two":
            assert torch.equal(sums_of_lanes(found).double(), exact.float().double())
        else:
            # Eight products of a tensor core and one addition, each rounded once (2^-24).
            assert ((sums_of_lanes(found) - exact).abs() <= size * 9 * 2.0**-24).all()


def start_of(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(16, 8, generator=generator).bfloat16().float()


def a_tile(
    seed: int, kind: str, selectors: tuple[int, int], sparse: bool, *, start: bool
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Registers of 32 lanes, the sums [16, 8] in float64 and the sums of magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    random = partial(torch.randint, generator=generator)
    columns, each = (128, 32) if sparse else (64, 16)
    a, b = random(0, 16, (16, columns)), random(0, 16, (columns, 8))
    stored, places = a, torch.zeros(16, columns // 8, dtype=torch.int64)
    if sparse:
        a, stored, places = with_stored_pairs(a, random)
    scale_a, scale_b = scales_of(kind, 16, generator), scales_of(kind, 8, generator)
    noise = random(-(2**31), 2**31, (32,)).to(torch.int32)
    operands = (
        a_in_lanes(stored),
        b_in_lanes(b),
        places_in_lanes(places),
        in_lanes(scale_a, partial(row_lane, selector=selectors[0]), noise),
        in_lanes(scale_b, lambda row: 4 * row + selectors[1], noise),
    )
    left = E2M1[a] * scale_a.view(torch.float8_e4m3fn).double().repeat_interleave(each, 1)
    right = E2M1[b] * scale_b.view(torch.float8_e4m3fn).double().repeat_interleave(each, 1).T
    first = start_of(seed).double() * start
    return operands, first + left @ right, first.abs() + left.abs() @ right.abs()


def with_stored_pairs(
    codes: Tensor, random: Callable[..., Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of which two pairs in four stay, those that stay, and four bits for eight codes."""
    dense, stored = torch.zeros_like(codes), torch.zeros(16, 64, dtype=torch.int64)
    places = torch.zeros(16, 16, dtype=torch.int64)
    choices = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    for row in range(16):
        for group in range(16):
            first, second = choices[int(random(0, 6, (1,)))]
            places[row, group] = first | second << 2
            for number, pair in enumerate((first, second)):
                at = slice(8 * group + 2 * pair, 8 * group + 2 * pair + 2)
                dense[row, at] = codes[row, at]
                stored[row, 4 * group + 2 * number : 4 * group + 2 * number + 2] = codes[row, at]
    return dense, stored, places


def a_in_lanes(stored: Tensor) -> Tensor:
    rows = stored.tolist()
    return registers(
        [
            [
                words(rows[q + 8 * (r % 2)][32 * (r // 2) + 8 * c : 32 * (r // 2) + 8 * c + 8])
                for r in range(4)
            ]
            for q, c in LANES
        ]
    )


def b_in_lanes(b: Tensor) -> Tensor:
    columns = b.T.tolist()
    count = len(b) // 32
    return registers(
        [
            [words(columns[q][32 * j + 8 * c : 32 * j + 8 * c + 8]) for j in range(count)]
            + [0] * (4 - count)
            for q, c in LANES
        ]
    )


def places_in_lanes(places: Tensor) -> Tensor:
    rows = places.tolist()
    return registers(
        [[words((rows[q + 8 * (c % 2)] + [0] * 16)[8 * (c // 2) :][:8])] for q, c in LANES]
    )


def sums_in_lanes(sums: Tensor) -> Tensor:
    return torch.stack(
        [torch.cat((sums[q, 2 * c : 2 * c + 2], sums[q + 8, 2 * c : 2 * c + 2])) for q, c in LANES]
    )


def sums_of_lanes(lanes: Tensor) -> Tensor:
    sums = torch.empty(16, 8, dtype=lanes.dtype)
    for lane, (q, c) in enumerate(LANES):
        sums[q, 2 * c : 2 * c + 2], sums[q + 8, 2 * c : 2 * c + 2] = (
            lanes[lane, :2],
            lanes[lane, 2:],
        )
    return sums

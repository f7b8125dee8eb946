"""The warpgroup kernel's own source (nvfp4_linear/warpgroup.cuh) without a GPU: compiled by g++,
with lanes that take turns.

Only the instructions are stood in for (emulator/nibble/warpgroup_instructions.cuh): barriers in
shared memory, bulk copies, products of a warpgroup. Late copies and products find a stage or a
register that is written too early; immediate ones find what is read before it is there.
"""

from __future__ import annotations

import ctypes
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.changes import OPERATORS
from tests.support.kernels.emulated import compile_on_the_host, needs_compiler
from tests.support.kernels.kernel_cases import (
    activations,
    assert_residual_comes_before_rounding,
    assert_rounded_once,
    assert_same_bits,
    in_order,
    packed_weight,
    values_of,
)

GLOBAL_SCALE = 1.23e-4
MEASURED = Path(__file__).parents[2] / "benchmarks/results/nvfp4_warpgroup_tiles_h200.json"
# Of warpgroup_division.h, tokens of a tile by rows: 32 by 256 with x in rows, 64 by 192, 128 by
# 128, by 192 and by 256; then with x in order, 16 by 192 and by 256, 32 by 192 and by 256.
FEW, SOME, MANY, THREE, WIDE, SIXTEEN, SIXTEEN_WIDE, FEW_THREE, FEW_WIDE = range(9)
UNITS, CLUSTERS, RANGES = range(3)  # Sharing of warpgroup_form.h
# Form, sharing, rows of x, N, K, clusters, thread blocks of each. Half a chunk at a row's end, more
# chunks than stages, several units of a block, ranks of unequal length, ranges that begin and end
# within a unit and three of one unit.
CASES = [
    (FEW, UNITS, 19, 48, 176, 1, 1),
    (FEW, UNITS, 40, 264, 912, 2, 1),
    (SOME, UNITS, 65, 264, 528, 1, 1),
    (MANY, UNITS, 130, 136, 528, 1, 1),
    (WIDE, UNITS, 129, 264, 656, 1, 1),
    (FEW, CLUSTERS, 40, 392, 528, 2, 2),
    (FEW, CLUSTERS, 20, 136, 1040, 1, 3),
    (SOME, CLUSTERS, 33, 272, 656, 1, 2),
    (MANY, CLUSTERS, 129, 136, 400, 1, 2),
    (FEW, RANGES, 40, 392, 528, 5, 1),
    (FEW, RANGES, 32, 136, 1040, 4, 1),
    (SOME, RANGES, 100, 272, 400, 3, 1),
    (MANY, RANGES, 130, 136, 528, 4, 1),
    (WIDE, RANGES, 129, 264, 528, 5, 1),
    (FEW, UNITS, 27, 200, 1296, 1, 1),
    (FEW, CLUSTERS, 9, 520, 912, 1, 2),
    (FEW, CLUSTERS, 40, 392, 1296, 2, 2),
    (SOME, CLUSTERS, 64, 600, 656, 1, 3),
    (THREE, UNITS, 130, 232, 656, 1, 1),
    (THREE, RANGES, 129, 264, 528, 5, 1),
    (SIXTEEN, UNITS, 9, 392, 1296, 1, 1),
    (SIXTEEN_WIDE, RANGES, 16, 600, 656, 4, 1),
    (FEW_THREE, CLUSTERS, 29, 392, 1296, 1, 3),
    (FEW_WIDE, UNITS, 17, 264, 912, 2, 1),
    (SIXTEEN, CLUSTERS, 16, 400, 1296, 1, 2),
]
ORDERED = [  # whole chunks of the next product's columns
    (SIXTEEN, UNITS, 9, 512, 272, 1, 1),
    (SIXTEEN_WIDE, CLUSTERS, 16, 512, 528, 1, 2),
    (FEW_THREE, RANGES, 29, 768, 272, 4, 1),
    (SOME, CLUSTERS, 70, 512, 400, 1, 3),
    (WIDE, UNITS, 130, 512, 272, 1, 1),
]
# Up to 64 tokens; then those whose x is in order.
AFTER_NORM = [
    (SIXTEEN, UNITS, 9, 392, 1280, 1, 1),
    (SIXTEEN, CLUSTERS, 16, 400, 1280, 1, 2),
    (SIXTEEN_WIDE, RANGES, 16, 600, 640, 4, 1),
    (FEW_THREE, CLUSTERS, 29, 392, 1280, 1, 3),
    (FEW_WIDE, UNITS, 17, 264, 896, 2, 1),
    (SOME, CLUSTERS, 64, 600, 640, 1, 3),
    (SOME, RANGES, 50, 272, 384, 3, 1),
]
BEFORE_NORM = [  # whole chunks of the next product's columns
    (FEW, UNITS, 12, 512, 272, 1, 1),
    (FEW, CLUSTERS, 31, 512, 528, 2, 2),
    (SIXTEEN, CLUSTERS, 16, 512, 528, 1, 2),
    (SIXTEEN_WIDE, RANGES, 9, 512, 656, 4, 1),
    (FEW_THREE, UNITS, 29, 768, 272, 2, 1),
    (SOME, CLUSTERS, 64, 512, 400, 1, 3),
    (SOME, RANGES, 40, 384, 400, 3, 1),
]
EPSILON = 1e-3
Multiply = Callable[..., Tensor]

pytestmark = [
    needs_compiler,
    pytest.mark.when_changed(*OPERATORS),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_on_the_host("warpgroup.cpp", tmp_path_factory.mktemp("emulator"))


@pytest.fixture
def multiply(library: ctypes.CDLL, kernels: object) -> Multiply:
    from nibble_kernels.nvfp4_linear.weight import prepare_weight

    def call(
        case: tuple[int, ...],
        x: Tensor,
        weight: tuple[Tensor, Tensor],
        *,
        late: bool = True,
        column_scale: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        silu_mul: bool = False,
        out: Tensor | None = None,
        norm_after: tuple[Tensor, Tensor, Tensor, int] | None = None,
        squares_before: Tensor | None = None,
    ) -> Tensor:
        """out: for a result in order. norm_after: its weight, what it scales in order, sums of
        squares of blocks, and tokens of a tile.
        """
        form, sharing, _, rows, columns, clusters, ranks = case
        prepared = prepare_weight(*weight, native=x.dtype == torch.float16)
        ordered = out is not None
        if out is None:
            out = torch.full((len(x), rows // (2 if silu_mul else 1)), torch.nan, dtype=x.dtype)
        tensors = (x, prepared.codes, prepared.scales, column_scale, bias, residual, out)
        arguments: list[Any] = [
            ctypes.c_void_p(one.data_ptr() if one is not None else None) for one in tensors
        ]
        arguments += [ctypes.c_float(GLOBAL_SCALE), len(x), rows, columns, clusters, ranks]
        is_bfloat = x.dtype == torch.bfloat16
        arguments += [silu_mul, ordered]
        *tensors, tile = norm_after or (None, None, None, 0)
        arguments += [ctypes.c_void_p(None if one is None else one.data_ptr()) for one in tensors]
        before = squares_before
        arguments += [tile, ctypes.c_void_p(None if before is None else before.data_ptr())]
        arguments += [0 if before is None else len(before), ctypes.c_float(EPSILON)]
        library.multiply_warpgroup_on_the_host(late, is_bfloat, form, sharing, *arguments)
        return out

    return call


def check_rounded_once(
    multiply: Multiply, case: tuple[int, ...], dtype: torch.dtype, late: bool
) -> None:
    _, _, tokens, rows, columns, _, _ = case
    weight, x = packed_weight(rows, columns), activations(tokens, columns, dtype)
    factors, bias = torch.rand(rows) + 0.5, torch.randn(rows).to(dtype)
    y = multiply(case, x, weight, late=late, column_scale=factors, bias=bias)
    expected = GLOBAL_SCALE * factors.double()
    assert_rounded_once(y, x, values_of(*weight), expected, bias.double())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_are_rounded_once(multiply: Multiply, case: tuple[int, ...]) -> None:
    check_rounded_once(multiply, case, torch.bfloat16, late=True)


@pytest.mark.parametrize("case", [*CASES[1:14:4], CASES[7], *CASES[15:]], ids=str)
def test_copies_and_products_that_are_over_at_once_give_the_same_bits(
    multiply: Multiply, case: tuple[int, ...]
) -> None:
    _, _, tokens, rows, columns, _, _ = case
    weight, x = packed_weight(rows, columns), activations(tokens, columns, torch.bfloat16)
    now, late = (multiply(case, x, weight, late=late) for late in (False, True))
    assert_same_bits((now,), (late,))
    assert_rounded_once(now, x, values_of(*weight), torch.tensor(GLOBAL_SCALE).double())


@pytest.mark.parametrize("case", [CASES[0], CASES[6], CASES[11], CASES[17]], ids=str)
def test_float16_is_rounded_once(multiply: Multiply, case: tuple[int, ...]) -> None:
    check_rounded_once(multiply, case, torch.float16, late=True)


@pytest.mark.parametrize("case", [CASES[0], CASES[8], CASES[9], CASES[14], CASES[15]], ids=str)
def test_silu_mul_comes_before_the_only_rounding(multiply: Multiply, case: tuple[int, ...]) -> None:
    _, _, tokens, rows, columns, _, _ = case
    weight, x = packed_weight(rows, columns), activations(tokens, columns, torch.bfloat16)
    y = multiply(case, x, weight, silu_mul=True).double()
    gate, up = (GLOBAL_SCALE * x.double() @ values_of(*weight).T).chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gate) * up
    assert ((y - exact).abs() <= exact.abs() * 2.0**-8 + 2.0**-18 * (gate * up).abs() + 1e-6).all()


@pytest.mark.parametrize("case", [CASES[3], CASES[6], CASES[10], CASES[13], *CASES[14:]], ids=str)
def test_a_residual_is_added_before_the_only_rounding(
    multiply: Multiply, case: tuple[int, ...]
) -> None:
    _, _, tokens, rows, columns, _, _ = case
    weight, x = packed_weight(rows, columns), activations(tokens, columns, torch.bfloat16)
    assert_residual_comes_before_rounding(lambda r: multiply(case, x, weight, residual=r))


@pytest.mark.parametrize("case", [CASES[6], CASES[10], CASES[16]], ids=str)
def test_a_row_does_not_depend_on_the_others_of_its_tile(
    multiply: Multiply, case: tuple[int, ...]
) -> None:
    _, _, _, rows, columns, _, _ = case
    weight, x = packed_weight(rows, columns), activations(32, columns, torch.bfloat16)
    everything = multiply(case, x, weight)
    for first, count in ((0, 17), (9, 23)):
        some = multiply(case, x[first : first + count].contiguous(), weight)
        assert_same_bits((some,), (everything[first : first + count],))


@pytest.mark.parametrize("silu_mul", [False, True])
@pytest.mark.parametrize("case", ORDERED, ids=str)
def test_an_ordered_result_has_the_values_of_rows_in_their_places(
    multiply: Multiply, case: tuple[int, ...], silu_mul: bool
) -> None:
    """Tokens past the last stay as they were."""
    form, _, tokens, rows, columns, _, _ = case
    tile = {SIXTEEN: 16, SIXTEEN_WIDE: 16, FEW_THREE: 32, SOME: 64, WIDE: 128}[form]
    weight, x = packed_weight(rows, columns), activations(tokens, columns, torch.bfloat16)
    in_rows = multiply(case, x, weight, silu_mul=silu_mul)
    untouched = torch.full((-(-tokens // tile) * tile, in_rows.shape[1]), 7.0).bfloat16()
    ordered = multiply(case, x, weight, silu_mul=silu_mul, out=untouched.clone())
    untouched[:tokens] = in_rows
    assert_same_bits((ordered.flatten(),), (in_order(untouched, tile).flatten(),))


def next_tile(tokens: int) -> int:
    return 16 if tokens <= 16 else 32 if tokens <= 32 else 64


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("case", BEFORE_NORM, ids=str)
def test_a_product_before_a_norm_leaves_scaled_values_and_sums_of_squares(
    multiply: Multiply, case: tuple[int, ...], late: bool
) -> None:
    _, _, tokens, rows, columns, clusters, ranks = case
    weight, x = packed_weight(rows, columns), activations(tokens, columns, torch.bfloat16)
    residual, norm_weight = torch.randn(tokens, rows).bfloat16(), torch.randn(rows).bfloat16()
    expected = multiply(case, x, weight, residual=residual)
    tile = next_tile(tokens)
    scaled = torch.full((tile, rows), 7.0).bfloat16()
    squares = torch.full((clusters * ranks, tile), torch.nan)
    norm = (norm_weight, scaled, squares, tile)
    y = multiply(case, x, weight, residual=residual, norm_after=norm, late=late)
    assert_same_bits((y,), (expected,))
    in_rows = torch.full((tile, rows), 7.0).bfloat16()
    in_rows[:tokens] = y * norm_weight
    assert_same_bits((scaled.flatten(),), (in_order(in_rows, tile).flatten(),))
    sums, exact = squares.double().sum(0)[:tokens], y.double().square().sum(-1)
    assert ((sums - exact).abs() <= exact * 2.0**-20).all()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("case", AFTER_NORM, ids=str)
def test_a_product_after_a_norm_gets_the_factors_before_the_only_rounding(
    multiply: Multiply, case: tuple[int, ...], late: bool
) -> None:
    """Of any number of blocks' sums of squares; tokens past the last have none."""
    _, _, tokens, rows, columns, _, _ = case
    weight, x = packed_weight(rows, columns), activations(tokens, columns, torch.bfloat16)
    bias = torch.randn(rows).bfloat16()
    for blocks in (1, 5, 132):
        squares = torch.rand(blocks, next_tile(tokens)) * columns
        squares[:, tokens:] = torch.nan
        y = multiply(case, x, weight, bias=bias, squares_before=squares, late=late)
        mean = squares[:, :tokens].double().sum(0) / columns
        factors = (mean + EPSILON).rsqrt()
        exact = GLOBAL_SCALE * x.double() @ values_of(*weight).T * factors[:, None] + bias.double()
        size = GLOBAL_SCALE * (x.double().abs() @ values_of(*weight).abs().T) * factors[:, None]
        bound = exact.abs() * 2.0**-8 + size * 2.0**-18
        assert ((y.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("case", AFTER_NORM[1:5], ids=str)
def test_silu_mul_comes_after_a_norms_factors(multiply: Multiply, case: tuple[int, ...]) -> None:
    _, _, tokens, rows, columns, _, _ = case
    weight, x = packed_weight(rows, columns), activations(tokens, columns, torch.bfloat16)
    squares = torch.rand(7, next_tile(tokens)) * columns
    y = multiply(case, x, weight, silu_mul=True, squares_before=squares).double()
    factors = (squares[:, :tokens].double().sum(0) / columns + EPSILON).rsqrt()[:, None]
    gate, up = (GLOBAL_SCALE * x.double() @ values_of(*weight).T * factors).chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gate) * up
    assert ((y - exact).abs() <= exact.abs() * 2.0**-8 + 2.0**-18 * (gate * up).abs() + 1e-6).all()


def divided(
    library: ctypes.CDLL,
    form: int,
    tokens: int,
    shape: tuple[int, int],
    multiprocessors: int,
    *,
    ordered: bool = False,
) -> tuple[int, int, int]:
    """Sharing, clusters and thread blocks of each that warpgroup_division.h chooses."""
    chosen = (ctypes.c_uint32 * 5)()
    library.divide_on_the_host(form, tokens, *shape, multiprocessors, ordered, chosen)
    assert chosen[3], "the form is not for so many tokens"
    return chosen[0], chosen[1], chosen[2]


def test_a_division_fits_the_device_and_depends_on_the_bucket_alone(library: ctypes.CDLL) -> None:
    generator, seen = random.Random(0), set[int]()
    in_rows = {FEW: (17, 32), SOME: (33, 64), MANY: (65, 128), THREE: (65, 128), WIDE: (999,)}
    buckets = [(False, *bucket) for bucket in in_rows.items()]
    buckets += [(True, form, (9, 16)) for form in (SIXTEEN, SIXTEEN_WIDE)]
    buckets += [(True, form, (17, 32)) for form in (FEW_THREE, FEW_WIDE)]
    for _ in range(300):
        shape = 8 * generator.randrange(1, 4000), 16 * generator.randrange(1, 1100)
        multiprocessors = generator.choice((132, 114, 78))
        chunks = -(-shape[1] // 128)
        for ordered, form, tokens in buckets:
            found = {
                divided(library, form, one, shape, multiprocessors, ordered=ordered)
                for one in tokens
            }
            assert len(found) == 1, (form, shape)
            sharing, clusters, ranks = found.pop()
            assert clusters >= 1 and clusters * ranks <= multiprocessors
            assert 2 <= ranks <= min(8, chunks) if sharing == CLUSTERS else ranks == 1
            seen.add(sharing)
    assert seen == {UNITS, CLUSTERS, RANGES}


def test_the_division_of_least_cost_is_the_fastest_measured_one(library: ctypes.CDLL) -> None:
    """Of whole units and equal ranges of tiles of 128 tokens, on an H200. Clusters were not
    measured.
    """
    measured = json.loads(MEASURED.read_text())["divisions"]
    cases = [row for row in measured if 128 < row["rows"] <= 2048]
    assert len(cases) == 24
    compared = 0
    for row in cases:
        found = []
        for form, rows in ((MANY, 128), (THREE, 192), (WIDE, 256)):
            chosen = (ctypes.c_uint32 * 5)()
            library.divide_on_the_host(form, row["rows"], row["n"], row["k"], 132, False, chosen)
            found.append((chosen[4], str((128, rows, chosen[0], chosen[2]))))
        us = {name: time for name, time in row["us"].items() if name.startswith("(")}
        if (chosen_one := min(found)[1]) in us:
            compared += 1
            assert us[chosen_one] == min(us.values()), row
    assert compared == 22


@pytest.mark.parametrize("multiprocessors", [3, 5])
def test_the_chosen_division_gives_the_sum(
    library: ctypes.CDLL, multiply: Multiply, multiprocessors: int
) -> None:
    for form, tokens, rows, columns in (
        (FEW, 27, 264, 912),
        (SOME, 64, 264, 528),
        (MANY, 70, 136, 656),
        (THREE, 70, 400, 656),
    ):
        division = divided(library, form, tokens, (rows, columns), multiprocessors)
        case = (form, division[0], tokens, rows, columns, *division[1:])
        check_rounded_once(multiply, case, torch.bfloat16, late=True)

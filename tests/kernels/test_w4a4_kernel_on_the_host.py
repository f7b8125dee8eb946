"""The W4A4 kernel's own source (nvfp4_linear/w4a4.cuh) without a GPU: compiled by g++, with lanes
that take turns, its products emulated as on every target before SM12x (nibble/mma_fp4.cuh).

Late copies find a stage that is written too early, immediate ones what is read before it is there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.changes import OPERATORS
from tests.support.kernels.emulated import compile_on_the_host, needs_compiler, pointers
from tests.support.kernels.kernel_cases import (
    activations,
    assert_residual_comes_before_rounding,
    assert_rounded_once,
    assert_same_bits,
    fitting_scale,
    packed_weight,
    values_of,
)

pytestmark = [needs_compiler, pytest.mark.when_changed(*OPERATORS)]

GLOBAL_SCALE = 1.23e-4
# Tokens of a tile, rows of x, N, K, thread blocks. Half a chunk and a quarter at a row's end, more
# chunks than stages, several units of a block, ranges that begin and end within a unit and three of
# one unit, a second tile of scales, groups of rows past the last.
CASES = [
    (32, 19, 48, 160, 1),
    (32, 40, 264, 1056, 5),
    (32, 17, 136, 1408, 4),
    (64, 100, 272, 416, 3),
    (128, 140, 136, 544, 4),
]
Multiply = Callable[..., Tensor]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_on_the_host("w4a4.cpp", tmp_path_factory.mktemp("emulator"))


def quantized(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and tiled scales as the activation's operator makes them, and what they stand for."""
    from nibble_kernels.activation_quant.reference import nvfp4_quant

    scale = fitting_scale(x)
    codes, tiled = nvfp4_quant(x, scale, tiled=True, exact=True)
    _, linear = nvfp4_quant(x, scale, tiled=False, exact=True)
    return codes, tiled, values_of(codes, linear)


@pytest.fixture
def multiply(library: ctypes.CDLL, kernels: object) -> Multiply:
    from nibble_kernels.nvfp4_linear.weight import prepare_weight

    def call(
        case: tuple[int, ...],
        x: tuple[Tensor, Tensor],
        weight: tuple[Tensor, Tensor],
        *,
        dtype: torch.dtype = torch.bfloat16,
        late: bool = True,
        column_scale: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        silu_mul: bool = False,
        most_tokens: int = 512,
    ) -> Tensor:
        tile, _, rows, columns, blocks = case
        prepared = prepare_weight(*weight, native=True)
        tokens = len(x[0])
        out = torch.full((tokens, rows // (2 if silu_mul else 1)), float("nan"), dtype=dtype)
        tensors = (*x, prepared.codes, prepared.scales, column_scale, bias, residual, out)
        arguments: list[Any] = [late, dtype == torch.bfloat16, tile, *pointers(*tensors)]
        arguments += [ctypes.c_float(GLOBAL_SCALE), tokens, rows, columns, blocks, silu_mul]
        arguments.append(most_tokens)
        library.multiply_w4a4_on_the_host(*arguments)
        return out

    return call


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_are_rounded_once(multiply: Multiply, case: tuple[int, ...]) -> None:
    _, tokens, rows, columns, blocks = case
    dtype = torch.bfloat16 if blocks > 1 else torch.float16
    weight = packed_weight(rows, columns)
    *x, values = quantized(activations(tokens, columns, torch.bfloat16))
    factors, bias = torch.rand(rows) + 0.5, torch.randn(rows).to(dtype)
    factor = 2.0**-4 * factors  # float16's range
    y = multiply(case, x, weight, dtype=dtype, column_scale=factor, bias=bias)
    assert_rounded_once(
        y, values, values_of(*weight), GLOBAL_SCALE * factor.double(), bias.double()
    )


def test_late_copies_do_not_change_a_bit(multiply: Multiply) -> None:
    case = CASES[2]
    _, tokens, rows, columns, _ = case
    weight = packed_weight(rows, columns)
    *x, _ = quantized(activations(tokens, columns, torch.bfloat16))
    now, late = (multiply(case, x, weight, late=late) for late in (False, True))
    assert_same_bits((now,), (late,))


def test_silu_mul_comes_before_the_only_rounding(multiply: Multiply) -> None:
    case = CASES[1]
    _, tokens, rows, columns, _ = case
    weight = packed_weight(rows, columns)
    *x, values = quantized(activations(tokens, columns, torch.bfloat16))
    x[0] &= 0x99  # small values: e^x stays in range
    values = values_of(x[0], untiled(x[1], tokens, columns))
    y = multiply(case, x, weight, silu_mul=True).double()
    gate, up = (GLOBAL_SCALE * values @ values_of(*weight).T).chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gate) * up
    assert ((y - exact).abs() <= exact.abs() * 2.0**-8 + 2.0**-18 * (gate * up).abs() + 1e-6).all()


@pytest.mark.parametrize("silu_mul", [False, True])
def test_a_residual_is_added_before_the_only_rounding(multiply: Multiply, silu_mul: bool) -> None:
    case = (32, 40, 264, 1056, 5)
    _, tokens, rows, columns, _ = case
    weight = packed_weight(rows, columns)
    *x, _ = quantized(activations(tokens, columns, torch.bfloat16))
    assert_residual_comes_before_rounding(
        lambda r: multiply(case, x, weight, residual=r, silu_mul=silu_mul)
    )


@pytest.mark.parametrize("silu_mul", [False, True])
def test_slices_of_x_give_the_rows_of_the_whole(multiply: Multiply, silu_mul: bool) -> None:
    """300 tokens in slices of 128: the third begins in the third tile of scales. K has an odd
    number of tiles, and one block a unit adds in the same order.
    """
    rows, columns, tokens = 48, 160, 300
    weight = packed_weight(rows, columns)
    *x, _ = quantized(activations(tokens, columns, torch.bfloat16))
    residual = torch.randn(tokens, rows // (2 if silu_mul else 1)).bfloat16()
    whole, sliced = (
        multiply(
            (64, tokens, rows, columns, 1),
            x,
            weight,
            residual=residual,
            silu_mul=silu_mul,
            most_tokens=most,
        )
        for most in (512, 128)
    )
    assert_same_bits((sliced,), (whole,))


def test_a_token_changes_no_other(multiply: Multiply) -> None:
    case = (32, 40, 48, 1056, 1)
    weight = packed_weight(48, 1056)
    x = activations(40, 1056, torch.bfloat16)
    *clean, _ = quantized(x)
    *changed, _ = quantized(x)
    tiles = changed[1].view(torch.uint8).flatten()
    tiles[3 * 16 : 3 * 16 + 4] = 0x7E  # token 3's scales of its first four blocks
    expected, found = (multiply(case, one, weight) for one in (clean, changed))
    others = [row for row in range(40) if row != 3]
    assert_same_bits((found[others],), (expected[others],))
    assert not torch.equal(found[3], expected[3])


def untiled(scales: Tensor, tokens: int, columns: int) -> Tensor:
    from nibble_kernels.scale_layout import untile

    return untile(scales, tokens, columns // 16)


@pytest.mark.parametrize("tokens", [1, 128, 2048, 8192])
def test_the_plan_counts_the_workspace(library: ctypes.CDLL, tokens: int) -> None:
    """Codes and scales as the quantization gives them, and the sums of 48 multiprocessors."""
    from nibble_kernels.activation_quant.reference import nvfp4_quant

    from nibble.plan.w4a4_memory import linear_bytes

    codes, scales = nvfp4_quant(torch.zeros(tokens, 416), torch.ones(()), True, True)
    sums = 48 * library.sum_bytes_of_a_block()
    assert linear_bytes((256, 416), tokens, 48) == codes.nbytes + scales.nbytes + sums

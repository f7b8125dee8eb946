"""The decode kernels' own sources (nvfp4_linear and nvfp4_moe) without a GPU: compiled by g++,
with lanes that take turns.

Only the instructions are stood in for (emulator/nibble/tensor_core.cuh), as PTX describes them.
Runs where each lane reads and writes, the order of x, both forms of operands with and without the
conversion instruction, phases, epilogues and tails.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from test_nvfp4_gpu_moe import (
    COLUMNS,
    EXPERTS,
    GLOBAL_SCALES,
    OUTPUTS,
    choices,
    expected_sums,
    experts_of,
)
from torch import Tensor

from tests.support.changes import OPERATORS
from tests.support.kernels.emulated import compile_on_the_host, needs_compiler, pointers
from tests.support.kernels.kernel_cases import (
    activations,
    assert_rounded_once,
    assert_same_bits,
    packed_weight,
    values_of,
)

GLOBAL_SCALE = 1.23e-4
# Rows of x, N, K, clusters, thread blocks of each, phases: every form, half a chunk at a row's end,
# fewer tiles than warps, groups of four rows, several rounds of groups, phases and ranks of unequal
# length.
CASES = [
    (1, 24, 176, 1, 1, 1),
    (8, 1128, 640, 1, 1, 1),
    (5, 48, 1280, 2, 2, 1),
    (3, 112, 3072, 2, 1, 3),
    (13, 32, 1056, 1, 2, 2),
    (9, 552, 256, 1, 1, 2),
    (29, 48, 640, 2, 1, 2),
    (20, 280, 144, 1, 2, 1),
]
# Up to eight rows, with a norm beside the product.
WITH_NORM = [
    (1, 48, 384, 1, 1, 1),
    (8, 1152, 640, 1, 1, 1),
    (5, 64, 1280, 2, 2, 1),
    (3, 112, 3072, 2, 1, 3),
    (6, 32, 1056, 1, 2, 2),
    (2, 208, 256, 3, 1, 1),
]
EPSILON = 1e-3
Multiply = Callable[..., Tensor]

pytestmark = [
    needs_compiler,
    pytest.mark.when_changed(*OPERATORS),
]


@pytest.fixture(scope="module")
def compiled_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], ctypes.CDLL]:
    """compiled_with(e2m1_instructions)"""

    @cache
    def compiled(instructions: bool) -> ctypes.CDLL:
        folder = tmp_path_factory.mktemp("emulator")
        return compile_on_the_host("decode.cpp", folder, e2m1=instructions)

    return compiled


@pytest.fixture(params=["software", "instructions"])
def multiply(
    request: pytest.FixtureRequest, compiled_with: Callable[[bool], ctypes.CDLL], kernels: object
) -> Multiply:
    from nibble_kernels.nvfp4_linear.weight import prepare_weight

    library = compiled_with(request.param == "instructions")

    def call(
        x: Tensor,
        codes: Tensor,
        scales: Tensor,
        *,
        bfloat_operands: bool = False,
        column_scale: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        division: tuple[int, int, int] = (1, 1, 1),
        silu_mul: bool = False,
        norm_after: tuple[Tensor, Tensor, Tensor] | None = None,
        squares_before: Tensor | None = None,
    ) -> Tensor:
        """norm_after: its weight, what it scales, and sums of squares of groups."""
        weight = prepare_weight(codes, scales, native=not bfloat_operands)
        rows, columns = len(codes), x.shape[1]
        out = torch.full((len(x), rows // (2 if silu_mul else 1)), float("nan"), dtype=x.dtype)
        arguments: list[Any] = pointers(
            x, weight.codes, weight.scales, column_scale, bias, residual, out
        )
        arguments += [ctypes.c_float(GLOBAL_SCALE), len(x), rows, columns, *division, silu_mul]
        tensors = norm_after or (None, None, None)
        squares = squares_before if norm_after is None else norm_after[2]
        arguments += [*pointers(*tensors), 0 if squares is None else squares.shape[1]]
        parts = 0 if squares_before is None else len(squares_before)
        arguments += [*pointers(squares_before), parts, ctypes.c_float(EPSILON)]
        library.multiply_on_the_host(x.dtype == torch.bfloat16, bfloat_operands, *arguments)
        return out

    return call


@pytest.mark.parametrize("operands", ["bfloat16", "float16", "bfloat16 as float16"])
def test_sums_are_rounded_once(multiply: Multiply, operands: str) -> None:
    dtype = torch.float16 if operands == "float16" else torch.bfloat16
    for tokens, rows, columns, *division in CASES:
        codes, scales = packed_weight(rows, columns)
        x, factors, bias = (
            activations(tokens, columns, dtype),
            torch.rand(rows) + 0.5,
            torch.randn(rows),
        )
        options: dict[str, Any] = {
            "bfloat_operands": operands == "bfloat16",
            "division": tuple(division),
        }
        y = multiply(x, codes, scales, column_scale=factors, bias=bias.to(dtype), **options)
        expected = GLOBAL_SCALE * factors.double()
        assert_rounded_once(y, x, values_of(codes, scales), expected, bias.to(dtype).double())


def test_activations_keep_their_range_in_every_phase(multiply: Multiply) -> None:
    """A row's power of two is another one in each phase."""
    codes, scales = packed_weight(32, 1024)
    x = torch.randn(3, 1024) * torch.tensor([[1e30], [1.0], [1e-30]])
    x[:, 512:] *= 1e-6
    x[1, :512] = 0
    y = multiply(x.bfloat16(), codes, scales, division=(1, 1, 2))
    factor = torch.tensor(GLOBAL_SCALE).double()
    assert_rounded_once(y, x.bfloat16(), values_of(codes, scales), factor)


def test_silu_mul_and_residual_come_before_the_only_rounding(multiply: Multiply) -> None:
    codes, scales = packed_weight(48, 512)
    x, residual = activations(11, 512, torch.bfloat16), torch.randn(11, 24).bfloat16()
    y = multiply(x, codes, scales, bfloat_operands=True, silu_mul=True, residual=residual).double()
    gate, up = (GLOBAL_SCALE * x.double() @ values_of(codes, scales).T).chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gate) * up + residual.double()
    assert ((y - exact).abs() <= exact.abs() * 2.0**-8 + 2.0**-18 * (gate * up).abs() + 1e-6).all()


def next_tile(tokens: int) -> int:
    return 1 if tokens == 1 else 2 ** (tokens - 1).bit_length()


@pytest.mark.parametrize("case", WITH_NORM, ids=str)
def test_a_product_before_a_norm_leaves_scaled_values_and_sums_of_squares(
    multiply: Multiply, case: tuple[int, ...]
) -> None:
    tokens, rows, columns, *division = case
    weight, x = packed_weight(rows, columns), activations(tokens, columns, torch.bfloat16)
    residual, norm_weight = torch.randn(tokens, rows).bfloat16(), torch.randn(rows).bfloat16()
    options: dict[str, Any] = {"bfloat_operands": True, "division": tuple(division)}
    expected = multiply(x, *weight, residual=residual, **options)
    scaled = torch.full((tokens, rows), torch.nan).bfloat16()
    squares = torch.full((-(-rows // 16), next_tile(tokens)), torch.nan)
    norm = (norm_weight, scaled, squares)
    y = multiply(x, *weight, residual=residual, norm_after=norm, **options)
    assert_same_bits((y, scaled), (expected, y * norm_weight))
    sums, exact = squares.double().sum(0)[:tokens], y.double().square().sum(-1)
    assert ((sums - exact).abs() <= exact * 2.0**-20).all()


@pytest.mark.parametrize("case", WITH_NORM, ids=str)
def test_a_product_after_a_norm_gets_the_factors_before_the_only_rounding(
    multiply: Multiply, case: tuple[int, ...]
) -> None:
    """Of any number of parts' sums of squares; tokens past the last have none."""
    tokens, rows, columns, *division = case
    weight, x = packed_weight(rows, columns), activations(tokens, columns, torch.bfloat16)
    bias = torch.randn(rows).bfloat16()
    options: dict[str, Any] = {"bfloat_operands": True, "division": tuple(division)}
    for parts in (1, 37, 1100):
        squares = torch.rand(parts, next_tile(tokens)) * columns
        squares[:, tokens:] = torch.nan
        y = multiply(x, *weight, bias=bias, squares_before=squares, **options)
        mean = squares[:, :tokens].double().sum(0) / columns
        factors = (mean + EPSILON).rsqrt()[:, None]
        exact = GLOBAL_SCALE * x.double() @ values_of(*weight).T * factors + bias.double()
        size = GLOBAL_SCALE * (x.double().abs() @ values_of(*weight).abs().T) * factors
        bound = exact.abs() * 2.0**-8 + size * 2.0**-18
        assert ((y.double() - exact).abs() <= bound).all()
        y = multiply(x, *weight, silu_mul=True, squares_before=squares, **options)
        gate, up = (GLOBAL_SCALE * x.double() @ values_of(*weight).T * factors).chunk(2, dim=-1)
        exact, size = torch.nn.functional.silu(gate) * up, (gate * up).abs()
        assert ((y - exact).abs() <= exact.abs() * 2.0**-8 + 2.0**-18 * size + 1e-6).all()


@pytest.mark.parametrize(
    ("tokens", "topk", "blocks"), [(1, 6, 13), (3, 2, 4), (8, 6, 9), (16, 4, 3)]
)
def test_each_pair_gets_its_experts_product(
    compiled_with: Callable[[bool], ctypes.CDLL],
    kernels: object,
    tokens: int,
    topk: int,
    blocks: int,
) -> None:
    """More blocks than experts in use, and fewer; first with silu · mul from tokens, then
    weighted from pairs.
    """
    from nibble_kernels.nvfp4_moe.weight import prepare_experts

    codes, scales = experts_of()
    experts = prepare_experts(codes, scales, GLOBAL_SCALES, native=False)
    ids, weights = choices(tokens, topk), torch.rand(tokens, topk)
    elsewhere = ((ids < 0) | (ids >= EXPERTS)).flatten()
    for by_pair in (False, True):
        x = activations(tokens * topk if by_pair else tokens, COLUMNS, torch.bfloat16) / 16
        y = torch.full(
            (tokens * topk, OUTPUTS if by_pair else OUTPUTS // 2), float("nan")
        ).bfloat16()
        arguments: list[Any] = pointers(x, *experts[:3], ids, weights if by_pair else None, y)
        arguments += [
            tokens,
            tokens * topk,
            tokens * topk // len(x),
            EXPERTS,
            OUTPUTS,
            COLUMNS,
            blocks,
        ]
        compiled_with(False).multiply_experts_on_the_host(*arguments, not by_pair)
        sums = expected_sums(x, codes, scales, ids)
        gate, up = sums.chunk(2, dim=-1)
        exact = (
            sums * weights.double().flatten()[:, None]
            if by_pair
            else torch.nn.functional.silu(gate) * up
        )
        size = sums.abs() if by_pair else (gate * up).abs()
        assert ((y.double() - exact).abs() <= exact.abs() * 2.0**-8 + size * 2.0**-16 + 1e-3).all()
        assert not y[elsewhere].any()

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
    ) -> Tensor:
        weight = prepare_weight(codes, scales, native=not bfloat_operands)
        rows, columns = len(codes), x.shape[1]
        out = torch.full((len(x), rows // (2 if silu_mul else 1)), float("nan"), dtype=x.dtype)
        arguments: list[Any] = pointers(
            x, weight.codes, weight.scales, column_scale, bias, residual, out
        )
        arguments += [ctypes.c_float(GLOBAL_SCALE), len(x), rows, columns, *division, silu_mul]
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

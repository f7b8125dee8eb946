"""A linear layer with an E4M3 weight in rows, in the decode kernel's own source
(nvfp4_linear/decode.cuh) without a GPU: compiled by g++, with lanes that take turns, against
float64.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.changes import OPERATORS
from tests.support.kernels.e4m3_cases import SCALES, e4m3_matrix, matrix_values
from tests.support.kernels.emulated import compile_on_the_host, needs_compiler, pointers
from tests.support.kernels.kernel_cases import activations, assert_rounded_once, assert_same_bits

pytestmark = [
    needs_compiler,
    pytest.mark.when_changed(*OPERATORS),
]

# Rows of x, N, K, clusters, thread blocks of each, phases: every form, columns that fill no chunk
# and no half of one, groups of four rows, fewer tiles than warps, several rounds of groups, phases
# and ranks of unequal length.
CASES = [
    (1, 24, 176, 1, 1, 1),
    (2, 16, 16, 1, 1, 1),
    (4, 40, 208, 2, 1, 1),
    (8, 1128, 640, 1, 1, 1),
    (5, 48, 1280, 2, 2, 1),
    (3, 112, 3072, 2, 1, 3),
    (13, 32, 1056, 1, 2, 2),
    (16, 552, 272, 1, 1, 2),
    (17, 48, 640, 2, 1, 2),
    (32, 280, 144, 1, 2, 1),
]
BLOCK_CASES = [case for case in CASES if case[1] % 16 == 0] + [(7, 528, 400, 3, 1, 1)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_on_the_host("e4m3_linear.cpp", tmp_path_factory.mktemp("emulator"))


class Layer:
    """A random weight, prepared, and its values in float64."""

    def __init__(self, rows: int, columns: int, scales: str) -> None:
        from nibble_kernels.e4m3_linear import prepare_e4m3_scales

        self.weight, scale, block = e4m3_matrix(rows, columns, scales)
        self.values = matrix_values(self.weight, scale)
        self.scales = prepare_e4m3_scales(self.weight, scale, block=block)

    def product(
        self,
        library: ctypes.CDLL,
        x: Tensor,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        division: tuple[int, int, int] = (1, 1, 1),
        silu_mul: bool = False,
        small: bool = False,
    ) -> Tensor:
        rows, columns = self.weight.shape
        out = torch.full((len(x), rows // (2 if silu_mul else 1)), float("nan")).bfloat16()
        tensors = (x, self.weight, *self.scales, bias, residual, out)
        arguments: list[Any] = [small, *pointers(*tensors)]
        arguments += [len(x), rows, columns, *division, silu_mul]
        library.multiply_e4m3_rows_on_the_host(*arguments)
        return out


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("scales", SCALES)
def test_sums_are_rounded_once(library: ctypes.CDLL, scales: str, small: bool) -> None:
    cases = BLOCK_CASES if scales == "block" else CASES
    for tokens, rows, columns, clusters, ranks, phases in cases:
        layer, x = Layer(rows, columns, scales), activations(tokens, columns, torch.bfloat16)
        bias = torch.randn(rows).bfloat16()
        y = layer.product(library, x, bias=bias, division=(clusters, ranks, phases), small=small)
        one = torch.ones(1, dtype=torch.float64)
        assert_rounded_once(y, x, layer.values, one, bias.double())


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("tokens", [3, 11, 20])
def test_silu_mul_and_residual_come_before_the_only_rounding(
    library: ctypes.CDLL, scales: str, tokens: int
) -> None:
    layer, x = Layer(48, 528, scales), activations(tokens, 528, torch.bfloat16) / 64
    residual = torch.randn(tokens, 24).bfloat16()
    y = layer.product(library, x, silu_mul=True, residual=residual).double()
    gate, up = (x.double() @ layer.values.T).chunk(2, dim=-1)
    gate_size, up_size = (x.double().abs() @ layer.values.abs().T).chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gate) * up + residual.double()
    size = gate_size * up.abs() + up_size * (gate.abs() + gate_size * 2.0**-20)
    assert ((y - exact).abs() <= exact.abs() * 2.0**-8 + size * 2.0**-20 + 1e-30).all()


@pytest.mark.parametrize("small", [False, True])
def test_repeats_and_other_tokens_leave_the_bits(library: ctypes.CDLL, small: bool) -> None:
    layer, x = Layer(144, 1040, "block"), activations(9, 1040, torch.bfloat16)
    options: dict[str, Any] = {"division": (2, 2, 2), "small": small}
    everything = layer.product(library, x, **options)
    assert_same_bits((layer.product(library, x, **options),), (everything,))
    x[0] = float("nan")
    assert_same_bits((layer.product(library, x, **options)[1:],), (everything[1:],))


def test_small_activations_keep_their_exponents(library: ctypes.CDLL) -> None:
    """bfloat16's range, not float16's, and weights below the smallest normal E4M3 number."""
    layer = Layer(32, 256, "tensor")
    x = activations(5, 256, torch.bfloat16)
    x *= torch.logspace(-30, -6, len(x))[:, None].bfloat16()
    y = layer.product(library, x)
    assert_rounded_once(y, x, layer.values, torch.ones(1, dtype=torch.float64))

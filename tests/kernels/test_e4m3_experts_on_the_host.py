"""E4M3 experts in the decode kernel's own source (nvfp4_moe/decode.cuh) without a GPU: compiled by
g++, with lanes that take turns, against float64.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.changes import OPERATORS
from tests.support.kernels.e4m3_cases import SCALES, e4m3_experts, e4m3_values
from tests.support.kernels.emulated import compile_on_the_host, needs_compiler
from tests.support.kernels.kernel_cases import activations, assert_same_bits

pytestmark = [
    needs_compiler,
    pytest.mark.when_changed(*OPERATORS),
]


class Case(NamedTuple):
    """Thread blocks more than experts in use, and fewer; rows that fill no round of groups,
    columns that fill no chunk; phases of unequal length.
    """

    tokens: int
    topk: int
    experts: int
    rows: int
    columns: int
    blocks: int
    phases: int = 1


CASES = [
    Case(1, 4, 5, 352, 176, 9),
    Case(8, 3, 6, 48, 416, 4),
    Case(5, 2, 4, 1120, 144, 3),
    Case(16, 4, 8, 288, 400, 11, phases=2),
    Case(11, 1, 3, 32, 1040, 2, phases=3),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_on_the_host("e4m3_experts.cpp", tmp_path_factory.mktemp("emulator"))


class Layer:
    """Random experts, choices of tokens and both in float64."""

    def __init__(self, case: Case, scales: str, *, gated: bool) -> None:
        from nibble_kernels.nvfp4_moe.e4m3 import prepare_e4m3_experts

        self.case, self.gated = case, gated
        parts = 2 if gated else 1
        weight, scale, block = e4m3_experts(case.experts, case.rows, case.columns, scales, parts)
        self.values = e4m3_values(weight, scale, parts)
        self.prepared = prepare_e4m3_experts(weight, scale, block=block, parts=parts)
        generator = torch.Generator().manual_seed(case.tokens)
        drawn = [
            torch.randperm(case.experts + 2, generator=generator)[: case.topk]
            for _ in range(case.tokens)
        ]
        ids = torch.stack(drawn)
        self.ids = torch.where(ids == case.experts + 1, -1, ids).int()
        self.weights = torch.rand(case.tokens, case.topk, generator=generator)
        inputs = case.tokens if gated else case.tokens * case.topk
        self.x = activations(inputs, case.columns, torch.bfloat16) / 64

    def products(self, library: ctypes.CDLL, small: bool = False) -> Tensor:
        """From tokens with silu · mul, or from pairs and weighted."""
        case, pairs = self.case, self.ids.numel()
        out = torch.full((pairs, case.rows // (2 if self.gated else 1)), float("nan")).bfloat16()
        tensors = [self.x, *self.prepared[:4], self.ids, None if self.gated else self.weights, out]
        arguments: list[Any] = [
            ctypes.c_void_p(None if one is None else one.data_ptr()) for one in tensors
        ]
        arguments += [len(self.ids), pairs, len(self.x), case.experts, case.rows, case.columns]
        library.multiply_e4m3_experts_on_the_host(
            small, *arguments, case.blocks, case.phases, self.gated
        )
        return out

    def assert_right(self, found: Tensor) -> None:
        x = self.x.double().repeat_interleave(self.ids.numel() // len(self.x), 0)
        for pair, expert in enumerate(self.ids.flatten().tolist()):
            y = found[pair].double()
            if not 0 <= expert < self.case.experts:
                assert not y.any()
                continue
            values = self.values[expert]
            exact, size = values @ x[pair], values.abs() @ x[pair].abs()
            if self.gated:
                (gate, up), (gate_size, up_size) = exact.chunk(2), size.chunk(2)
                exact = torch.nn.functional.silu(gate) * up
                # What float32 sums may be off moves both factors.
                size = gate_size * up.abs() + up_size * (gate.abs() + gate_size * 2.0**-20)
            else:
                exact, size = (
                    part * self.weights.flatten()[pair].double() for part in (exact, size)
                )
            assert ((y - exact).abs() <= exact.abs() * 2.0**-8 + size * 2.0**-20 + 1e-30).all()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("case", "scales"),
    [*((case, "block") for case in CASES), (CASES[0], "tensor"), (CASES[3], "channel")],
    ids=str,
)
def test_each_pair_gets_its_experts_product_rounded_once(
    library: ctypes.CDLL, case: Case, scales: str, gated: bool
) -> None:
    layer = Layer(case, scales, gated=gated)
    layer.assert_right(layer.products(library))


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=str)
def test_the_forms_for_less_shared_memory_compute_the_same(
    library: ctypes.CDLL, case: Case, scales: str
) -> None:
    layer = Layer(case, scales, gated=True)
    layer.assert_right(layer.products(library, small=True))


@pytest.mark.parametrize("which", ["w13", "w2"])
def test_60_experts_of_1408_rows(library: ctypes.CDLL, which: str) -> None:
    """1408 = 11 blocks of 128 rows: gate's blocks end where up's begin."""
    rows, columns = (2816, 256) if which == "w13" else (256, 1408)
    layer = Layer(Case(2, 2, 60, rows, columns, 5), "block", gated=which == "w13")
    layer.assert_right(layer.products(library))


@pytest.mark.parametrize("tokens", [8, 16])
@pytest.mark.parametrize("kind", ["one expert", "one each", "others'"])
def test_any_routing(library: ctypes.CDLL, tokens: int, kind: str) -> None:
    layer = Layer(Case(tokens, 2, 20, 48, 272, 6), "block", gated=True)
    first = {
        "one expert": torch.full((tokens,), 3),
        "one each": torch.arange(tokens),
        "others'": torch.full((tokens,), -1),
    }[kind]
    layer.ids = torch.stack((first, torch.full_like(first, 20)), 1).int()
    layer.assert_right(layer.products(library))


@pytest.mark.parametrize("small", [False, True])
def test_replays_and_other_tokens_leave_the_bits(library: ctypes.CDLL, small: bool) -> None:
    layer = Layer(CASES[3], "block", gated=True)
    everything = layer.products(library, small)
    assert_same_bits((everything,), (layer.products(library, small),))
    layer.x[0] = float("nan")
    layer.ids[1] = -1
    kept = slice(2 * layer.case.topk, None)
    assert_same_bits((layer.products(library, small)[kept],), (everything[kept],))


def test_small_activations_keep_their_exponents(library: ctypes.CDLL) -> None:
    """bfloat16's range, not float16's, and weights below the smallest normal E4M3 number."""
    layer = Layer(CASES[0], "tensor", gated=False)
    layer.x *= torch.logspace(-30, -6, len(layer.x))[:, None].bfloat16()
    layer.assert_right(layer.products(library))

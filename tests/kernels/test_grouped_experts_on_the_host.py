"""The source of the kernel of experts (nvfp4_moe/grouped.cuh) without a GPU: compiled by g++, with
lanes that take turns. All thread blocks run at once, so that units wait for others' intermediates.

Late copies and products find a stage, a register or an intermediate that is used too early.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.changes import OPERATORS
from tests.support.kernels.emulated import compile_on_the_host, needs_compiler
from tests.support.kernels.kernel_cases import (
    activations,
    assert_same_bits,
    packed_weight,
    values_of,
)

FUNCTIONS = ("silu", "gelu_tanh", "relu2")
# Tokens of a tile, thread blocks, tokens, experts a token, experts, hidden, intermediate. Rows and
# columns that fill no unit and no chunk, several tiles of an expert, more chunks than stages. -4
# and -8 are the forms for few pairs, which begin with the router's choices.
CASES = [
    (-4, 3, 3, 2, 4, 176, 48),
    (-4, 2, 12, 1, 2, 2320, 80),
    (-4, 3, 12, 3, 4, 272, 160),
    (-4, 2, 40, 3, 400, 144, 32),
    (-8, 3, 3, 2, 4, 176, 48),
    (-8, 2, 12, 1, 2, 1296, 80),
    (-8, 3, 12, 3, 4, 400, 160),
    (-8, 2, 170, 3, 400, 144, 32),
    (8, 3, 3, 2, 4, 176, 48),
    (8, 2, 12, 1, 2, 1296, 80),
    (8, 3, 12, 3, 4, 272, 160),
    (16, 2, 36, 1, 2, 272, 80),
    (32, 2, 40, 1, 2, 272, 80),
    (64, 2, 70, 1, 2, 144, 144),
    (128, 2, 131, 1, 2, 400, 144),
]

pytestmark = [
    needs_compiler,
    pytest.mark.when_changed(*OPERATORS),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_on_the_host("grouped.cpp", tmp_path_factory.mktemp("emulator"))


class Stored(ctypes.Structure):
    """A weight's tensors, for the emulated kernel."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("codes", "scales", "global_scales", "bias")]


class Layer:
    """Experts with random weights, their prepared form and their sums in float64. `shared`: the
    last expert is the shared one of every token.
    """

    def __init__(
        self,
        case: tuple[int, ...],
        function: str = "silu",
        gated: bool = True,
        *,
        biased: bool = False,
        shared: bool = False,
    ) -> None:
        from nibble_kernels.nvfp4_moe.weight import prepare_experts

        self.form, self.blocks, tokens, self.topk, self.experts, self.hidden, self.inner = case
        self.function, self.gated = function, gated
        self.shared, all_experts = shared, self.experts + shared
        rows = self.inner * (2 if gated else 1)
        self.limit, self.alpha, self.beta = (2.0, 1.702, 1.0) if biased else (math.inf, 1.0, 0.0)
        self.weights = [
            [packed_weight(rows, self.hidden, 2 * seed) for seed in range(all_experts)],
            [packed_weight(self.hidden, self.inner, 2 * seed + 1) for seed in range(all_experts)],
        ]
        generator = torch.Generator().manual_seed(tokens)
        self.factors = [
            torch.rand(all_experts, 2, generator=generator) * 1e-5 + 1e-6,
            (torch.rand(all_experts, 1, generator=generator) * 1e-3 + 1e-4).expand(-1, 2),
        ]
        self.biases = [
            torch.randn(all_experts, count, generator=generator).bfloat16() if biased else None
            for count in (rows, self.hidden)
        ]
        self.prepared = []  # of the routed experts, then of the shared one
        for some in (slice(self.experts), slice(self.experts, None))[: 1 + shared]:
            for weights, factors in zip(self.weights, self.factors, strict=True):
                codes, scales = (torch.stack(parts) for parts in zip(*weights[some], strict=True))
                self.prepared.append(prepare_experts(codes, scales, factors[some], native=False))
        self.x = activations(tokens, self.hidden, torch.bfloat16) / 64
        self.ids = torch.stack(
            [
                torch.randperm(self.experts + 1, generator=generator)[: self.topk]
                for _ in range(tokens)
            ]
        ).int()
        self.ids[self.ids == self.experts] = -1
        self.ids[0, 0] = 0
        self.router = torch.rand(tokens, self.topk, generator=generator)
        self.shared_weights = torch.rand(tokens, generator=generator).bfloat16() if shared else None

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Experts and weights of each token's pairs."""
        if self.shared_weights is None:
            return self.ids, self.router
        more = torch.full((len(self.x), 1), self.experts, dtype=torch.int32)
        weights = torch.cat((self.router, self.shared_weights.float()[:, None]), dim=1)
        return torch.cat((self.ids, more), dim=1), weights

    def products(self, library: ctypes.CDLL, late: bool = True) -> Tensor:
        """[pairs, hidden]; NaN for the pairs of other processes' experts."""
        pairs = self.pairs()[0].numel()
        out = torch.full((pairs, self.hidden), float("nan"), dtype=torch.bfloat16)
        pointer = self._pointer
        stored = (Stored * 4)()
        for place, parts in enumerate(self.prepared):
            bias = self.biases[place] if place < 2 else None
            stored[place] = Stored(*(pointer(part) for part in (*parts[:3], bias)))
        arguments: list[Any] = [pointer(self.x), pointer(self.ids), pointer(self.router)]
        arguments += [pointer(self.shared_weights)]
        arguments += [len(self.x), self.topk, self.experts, self.hidden, self.inner]
        arguments += [stored, pointer(out), FUNCTIONS.index(self.function), self.gated]
        arguments += [ctypes.c_float(one) for one in (self.limit, self.alpha, self.beta)]
        library.multiply_experts_on_the_host.restype = ctypes.c_bool
        assert library.multiply_experts_on_the_host(late, self.form, self.blocks, *arguments)
        return out

    @staticmethod
    def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
        return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())

    def exact(self) -> Tensor:
        from nibble_kernels.nvfp4_moe.reference import activate

        ids, weights = self.pairs()
        out = torch.full((ids.numel(), self.hidden), float("nan"), dtype=torch.float64)
        for pair, expert in enumerate(ids.flatten().tolist()):
            if expert < 0:
                continue
            h = self._multiply(0, expert, self.x[pair // ids.shape[1]].double())
            limits = (self.limit, self.alpha, self.beta)
            h = activate(h, self.function, self.gated, False, *limits).bfloat16().double()
            out[pair] = self._multiply(1, expert, h) * weights.flatten()[pair].double()
        return out

    def _multiply(self, which: int, expert: int, x: Tensor) -> Tensor:
        weight = values_of(*self.weights[which][expert])
        factors = self.factors[which][expert].double().repeat_interleave(len(weight) // 2)
        bias = self.biases[which]
        return weight @ x * factors + (0.0 if bias is None else bias[expert].double())


def assert_close(found: Tensor, exact: Tensor) -> None:
    """Every row within the roundings of the intermediate and of the result; rows of other
    processes' experts untouched.
    """
    assert torch.equal(found.isnan(), exact.isnan())
    found, exact = found.double().nan_to_num(), exact.nan_to_num()
    sizes = exact.norm(dim=-1)
    assert ((found - exact).norm(dim=-1) <= sizes * 0.004 + 1e-30).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_pair_gets_its_experts_output(library: ctypes.CDLL, case: tuple[int, ...]) -> None:
    layer = Layer(case)
    assert_close(layer.products(library), layer.exact())


@pytest.mark.parametrize("case", [*CASES[:3], *CASES[4:7], *CASES[8:]], ids=str)
def test_a_shared_expert_is_one_more_of_every_token(
    library: ctypes.CDLL, case: tuple[int, ...]
) -> None:
    layer = Layer(case, shared=True)
    assert_close(layer.products(library), layer.exact())


@pytest.mark.parametrize(
    ("function", "gated"), [("silu", True), ("gelu_tanh", True), ("relu2", False)]
)
@pytest.mark.parametrize("case", [CASES[0], CASES[4], CASES[8], CASES[11]], ids=str)
def test_activations_and_biases(
    library: ctypes.CDLL, case: tuple[int, ...], function: str, gated: bool
) -> None:
    layer = Layer(case, function, gated, biased=True)
    assert_close(layer.products(library), layer.exact())


@pytest.mark.parametrize("case", [CASES[1], CASES[5], CASES[9], CASES[10], CASES[12]], ids=str)
def test_copies_that_are_over_at_once_give_the_same_bits(
    library: ctypes.CDLL, case: tuple[int, ...]
) -> None:
    layer = Layer(case)
    assert_same_bits((layer.products(library, late=False),), (layer.products(library),))


@pytest.mark.parametrize("case", [CASES[2], CASES[6], CASES[10], CASES[11]], ids=str)
def test_a_token_does_not_depend_on_the_others(library: ctypes.CDLL, case: tuple[int, ...]) -> None:
    layer = Layer(case)
    everything = layer.products(library)
    layer.x, layer.ids, layer.router = (
        part[5:].contiguous() for part in (layer.x, layer.ids, layer.router)
    )
    assert_same_bits((layer.products(library),), (everything[5 * layer.topk :],))


@pytest.mark.parametrize("tokens", [1, 9, 40, 100, 300, 700, 3000, 8192])
@pytest.mark.parametrize(
    "shape",
    [(128, 8, 2048, 768, 2), (256, 8, 2048, 512, 2), (60, 4, 2048, 1408, 2), (8, 2, 1040, 176, 1)],
)
def test_the_plan_counts_the_workspace(
    library: ctypes.CDLL, shape: tuple[int, ...], tokens: int
) -> None:
    from nibble.plan.expert_memory import tiles_bytes

    experts, chosen, hidden, inner, _ = shape
    library.experts_workspace_bytes.restype = ctypes.c_int64
    found = library.experts_workspace_bytes(tokens * chosen, experts, hidden, inner)
    assert found == tiles_bytes(shape, tokens)

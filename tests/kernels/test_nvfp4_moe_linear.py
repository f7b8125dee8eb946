"""nvfp4_moe_linear: a layer of experts from the router's choices to the sum. On the CPU it is the
specification; on SM90, every form of the kernel against float64.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.changes import OPERATORS
from tests.support.kernels.kernel_cases import assert_same_bits, values_of

pytestmark = pytest.mark.when_changed(*OPERATORS)
FORMS = (8, 16, 32, 64, 128)  # tokens of a tile
FEW, MOST_FEW_PAIRS = (-4, -8), 640  # groups of a unit in the forms for few pairs
SILU = ("silu", True, math.inf, 1.0, 0.0)
ACTIVATIONS = [
    SILU,
    ("gelu_tanh", True, math.inf, 1.0, 0.0),
    ("silu", True, 7.0, 1.702, 1.0),
    ("relu2", False, math.inf, 1.0, 0.0),
]
SMALL = (6, 3, 144, 80)  # experts, experts a token, hidden, intermediate
ODD = (60, 4, 2048, 1408)
SHAPES = [ODD, (128, 8, 2048, 768), (256, 8, 2048, 512), (512, 10, 1024, 512), (8, 2, 1040, 176)]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, kernels: Any) -> str:
    if request.param == "cuda":
        assert kernels.implementations()["cuda"] == "compiled"
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("nvfp4_moe_linear is for SM90")
    return request.param


class Layer:
    """Experts of random weights, prepared, and their values."""

    def __init__(self, shape: tuple[int, ...], gated: bool, device: str) -> None:
        experts, self.topk, hidden, inner = shape
        self.gated, self.device = gated, device
        self.w13, self.first = self._weight(experts, inner * (2 if gated else 1), hidden)
        self.w2, self.second = self._weight(experts, hidden, inner)

    def _weight(self, experts: int, rows: int, columns: int) -> tuple[Any, list[Tensor]]:
        from nibble_kernels.nvfp4_moe.weight import prepare_experts

        generator = torch.Generator().manual_seed(rows)
        codes = torch.randint(
            0, 256, (experts, rows, columns // 2), dtype=torch.uint8, generator=generator
        )
        scales = torch.randint(
            0x20, 0x48, (experts, rows, columns // 16), dtype=torch.uint8, generator=generator
        )
        codes, scales = codes.to(self.device), scales.to(self.device).view(torch.float8_e4m3fn)
        factors = (torch.rand(experts, 2, generator=generator) + 0.5).to(self.device) * 0.01
        if rows != columns and self.gated:
            factors[:, 1] = factors[:, 0] * 0.7  # gate and up have their own
        values = [
            values_of(*(part.cpu() for part in one)).bfloat16()
            for one in zip(codes, scales, strict=True)
        ]
        return prepare_experts(codes, scales, factors, native=False), values

    def exact(self, routed: Routed, activation: tuple[Any, ...], biases: Biases) -> Tensor:
        from nibble_kernels.nvfp4_moe.reference import activate

        function, gated, *limits = activation
        x, weights, ids = (part.cpu() for part in routed)
        y = torch.zeros(ids.numel(), x.shape[1], dtype=torch.float64)
        for expert in ids[(ids >= 0) & (ids < len(self.first))].unique().tolist():
            pairs = (ids.flatten() == expert).nonzero()[:, 0]
            h = self._product(0, expert, x[pairs // self.topk], biases)
            h = activate(h, function, gated, False, *limits).to(x.dtype)
            products = self._product(1, expert, h, biases)
            y[pairs] = products * weights.flatten()[pairs].double()[:, None]
        return y.unflatten(0, (-1, self.topk)).sum(1)

    def shared(self, weights: Tensor) -> Any:
        """The last expert as a shared one with these weights [T, 1]."""
        from nibble_kernels.nvfp4_moe.grouped import SharedExpert

        last = [part._replace(codes=part.codes[-1:].clone(), scales=part.scales[-1:].clone(),
                global_scales=part.global_scales[-1:].clone())
                for part in (self.w13, self.w2)]  # fmt: skip
        return SharedExpert(weights.to(self.device, torch.bfloat16), *last)

    def _product(self, which: int, expert: int, x: Tensor, biases: Biases) -> Tensor:
        values = (self.first, self.second)[which][expert].double()
        factors = (self.w13, self.w2)[which].global_scales[expert].cpu().double()
        y = x.double() @ values.T * factors.repeat_interleave(len(values) // 2)
        bias = biases[which]
        return y if bias is None else y + bias[expert].cpu().double()

    def run(
        self, routed: Routed, activation: tuple[Any, ...] = SILU, *, form: int = 0, **biases: Any
    ) -> Tensor:
        from nibble_kernels.nvfp4_moe.grouped import nvfp4_moe_linear

        names = ("function", "gated", "limit", "alpha", "beta")
        formula = dict(zip(names, activation, strict=True))
        return nvfp4_moe_linear(*routed, self.w13, self.w2, form=form, **formula, **biases)


class Routed(NamedTuple):
    x: Tensor
    weights: Tensor
    ids: Tensor

    def part(self, rows: slice) -> Routed:
        return Routed(*(one[rows].contiguous() for one in self))


Biases = tuple[Tensor | None, Tensor | None]


def routed(kind: str, tokens: int, shape: tuple[int, ...], device: str) -> Routed:
    experts, topk, hidden, _ = shape
    generator = torch.Generator().manual_seed(tokens)
    likely = torch.ones(experts) if kind != "zipf" else (torch.arange(experts) + 1.0) ** -1.2
    ids = torch.multinomial(likely.expand(tokens, -1), topk, generator=generator)
    if kind == "one expert":
        ids = torch.full_like(ids, -1)
        ids[:, 0] = experts - 1
    if kind == "each":
        ids = (torch.arange(tokens * topk) % experts).view(tokens, topk)
    if kind == "twice":
        ids = ids[:, :1].expand(-1, topk)
    if kind == "others":
        ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.5, -1, ids)
        ids[0] = experts + 3
    x = torch.randn(tokens, hidden, generator=generator).bfloat16() * 0.1
    weights = torch.rand(tokens, topk, generator=generator)
    return Routed(*(one.to(device) for one in (x, weights, ids.int())))


def assert_close(found: Tensor, exact: Tensor) -> None:
    """Within the roundings of the intermediate, of each product and of the sum; zeros exactly."""
    found = found.cpu().double()
    size = exact.norm(dim=-1)
    assert ((found - exact).norm(dim=-1) <= size * 0.006).all()


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_the_specification_and_every_form_give_the_sum(
    device: str, activation: tuple[Any, ...], biased: bool
) -> None:
    layer = Layer(SMALL, activation[1], device)

    def bias(rows: int) -> Tensor | None:
        return torch.randn(SMALL[0], rows, device=device).bfloat16() if biased else None

    biases: Biases = (bias(layer.w13.rows), bias(layer.w2.rows))
    given = routed("others", 20, SMALL, device)
    exact = layer.exact(given, activation, biases)
    for form in (0,) if device == "cpu" else (*FEW, *FORMS):
        found = layer.run(given, activation, form=form, w13_bias=biases[0], w2_bias=biases[1])
        assert_close(found, exact)
        assert not found[0].any()  # all of its experts are another process's


def test_a_shared_expert_is_one_more_of_every_token(device: str) -> None:
    """By every form, for few tokens and many, with experts of other processes."""
    shapes = [SMALL] if device == "cpu" else [SMALL, (256, 8, 2048, 512), (512, 10, 1024, 512)]
    for shape in shapes:
        layer = Layer(shape, True, device)
        for tokens in (1, 5, 20) if device == "cpu" else (1, 5, 20, 64, 150):
            given = routed("others", tokens, shape, device)
            weights = torch.rand(tokens, 1, generator=torch.Generator().manual_seed(0)).bfloat16()
            ids = torch.full((tokens, 1), shape[0] - 1, dtype=torch.int32)
            alone = Routed(given.x, weights.float().to(device), ids.to(device))
            layer.topk = 1
            exact = layer.exact(alone, SILU, (None, None))
            layer.topk = shape[1]
            exact += layer.exact(given, SILU, (None, None))
            few = FEW if tokens * (shape[1] + 1) <= MOST_FEW_PAIRS else ()
            for form in (0,) if device == "cpu" else (0, *few, *FORMS):
                assert_close(layer.run(given, form=form, shared=layer.shared(weights)), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["uniform", "zipf", "one expert", "each", "twice", "others"])
def test_shapes_and_routings(kernels: Any, shape: tuple[int, ...], kind: str) -> None:
    layer = Layer(shape, True, "cuda")
    for tokens in (1, 2, 7, 16, 33, 150):
        given = routed(kind, tokens, shape, "cuda")
        exact = layer.exact(given, SILU, (None, None))
        few = FEW if tokens * shape[1] <= MOST_FEW_PAIRS else ()
        for form in (0, *few, *FORMS):
            assert_close(layer.run(given, form=form), exact)


@pytest.mark.gpu
def test_replays_and_batch_mates(kernels: Any) -> None:
    """100 bit-equal replays; a token's bits depend on its form alone, also beside a NaN; a graph
    takes other routings.
    """
    shape = (128, 8, 2048, 768)
    layer = Layer(shape, True, "cuda")
    for tokens, form in (
        (1, -4),
        (4, -4),
        (60, -4),
        (1, -8),
        (8, -8),
        (64, -8),
        (4, 8),
        (32, 8),
        (64, 16),
        (200, 32),
        (400, 64),
        (900, 128),
    ):
        given = routed("zipf", tokens, shape, "cuda")
        layer.run(given, form=form)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer.run(given, form=form)
        graph.replay()
        first = y.clone()
        for _ in range(100):
            y.fill_(float("nan"))
            graph.replay()
            assert_same_bits((y,), (first,), tokens)
        half = slice(tokens // 2, None)
        assert_same_bits((layer.run(given.part(half), form=form),), (first[half],))
        bad = given.x.clone()
        bad[0] = float("nan")
        assert_same_bits((layer.run(given._replace(x=bad), form=form)[1:],), (first[1:],))
        given.ids.copy_(routed("others", tokens, shape, "cuda").ids)
        graph.replay()
        assert_same_bits((y,), (layer.run(given, form=form),))


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_experts_of_one_token_give_the_same_bits_in_300_runs(kernels: Any, form: int) -> None:
    """Stages of short units are filled again soonest: loads that a copy overtakes show there."""
    shape = (256, 8, 2048, 512)
    layer = Layer(shape, True, "cuda")
    for tokens in (16, 33):
        given = routed("each", tokens, shape, "cuda")
        first = layer.run(given, form=form)
        assert_close(first, layer.exact(given, SILU, (None, None)))
        for _ in range(300):
            assert_same_bits((layer.run(given, form=form),), (first,), tokens)


def test_the_operator_is_registered_soundly(device: str) -> None:
    from nibble_kernels.nvfp4_moe.grouped import NOT_SHARED

    layer = Layer(SMALL, True, device)
    w13, w2 = layer.w13, layer.w2
    parts = (*w13[:3], None, w13.rows, *w2[:3], None, w2.rows)
    for shared in (NOT_SHARED, layer.shared(torch.ones(4, 1)).tensors):
        given = (*routed("uniform", 4, SMALL, device), *parts, 0, *SILU[1:], *shared, 0)
        torch.library.opcheck(torch.ops.nibble.nvfp4_moe_linear.default, given)

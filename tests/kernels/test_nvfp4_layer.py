"""nvfp4_layer_products: everything between two attentions in one launch, against the operators of
its parts. On the CPU it is them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels.kernel_cases import activations, assert_same_bits, packed_weight

EPSILON, GLOBAL_SCALE = 1e-6, 2e-4
# Rows, queries, hidden and intermediate size, qkv's outputs: small, groups that do not divide the
# blocks, half a chunk at a row's end, several rounds of groups, as Qwen3-8B and wider.
SHAPES = [
    (1, 96, 144, 272, 80),
    (3, 512, 1040, 2064, 0),
    (4, 1024, 2048, 5632, 3072),
    (7, 256, 2560, 9728, 24),
    (2, 4096, 4096, 12288, 6144),
    (1, 5120, 5120, 25600, 7168),
    (2, 1024, 1024, 23040, 512),
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, kernels: Any) -> str:
    """On the CPU the specification computes; CUDA must be compiled."""
    assert request.param == "cpu" or kernels.implementations()["cuda"] == "compiled"
    return request.param


class Layer:
    """A layer with random weights, and its calls."""

    def __init__(
        self,
        queries: int,
        hidden: int,
        intermediate: int,
        qkv: int,
        device: str,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ) -> None:
        from nibble_kernels.nvfp4_layer import Product, new_meetings
        from nibble_kernels.nvfp4_linear.weight import prepare_weight

        self.device, self.dtype, self.queries, self.hidden = device, dtype, queries, hidden
        generator = torch.Generator().manual_seed(seed)
        shapes = [(hidden, queries), (2 * intermediate, hidden), (hidden, intermediate)]
        shapes += [(qkv, hidden)] if qkv else []
        self.products = []
        for outputs, columns in shapes:
            codes, _ = packed_weight(outputs, columns, seed)
            scales = torch.rand(outputs, columns // 16, generator=generator) * 2 - 1
            weight = prepare_weight(
                codes.to(device),
                scales.to(device, torch.float8_e4m3fn),
                native=dtype == torch.float16,
            )
            factors = torch.rand(outputs, generator=generator).to(device) + 0.5
            bias = torch.randn(outputs, generator=generator).to(device, dtype)
            scale = GLOBAL_SCALE * (4096 / columns) ** 0.5
            self.products.append(Product(weight, scale, factors, bias))
        self.norms = [
            (torch.rand(hidden, generator=generator) + 0.5).to(device, dtype) for _ in range(2)
        ]
        self.meetings = new_meetings(device)

    def inputs(self, rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        return (
            (activations(rows, self.queries, self.dtype, seed) / 16).to(self.device),
            activations(rows, self.hidden, self.dtype, seed + 1).to(self.device),
        )

    def __call__(
        self, attended: Tensor, residual: Tensor, **rest: Any
    ) -> tuple[Tensor, Tensor | None]:
        from nibble_kernels.nvfp4_layer import nvfp4_layer_products

        output, gate_up, down, *qkv = self.products
        following = (self.norms[1], qkv[0]) if qkv else (None, None)
        return nvfp4_layer_products(
            attended,
            residual,
            output,
            self.norms[0],
            gate_up,
            down,
            EPSILON,
            self.meetings,
            *following,
            **rest,
        )

    def apart(self, attended: Tensor, residual: Tensor) -> list[Tensor]:
        """By the operators of the parts."""
        from nibble_kernels.nvfp4_linear.gpu import nvfp4_decode_linear
        from nibble_kernels.rms_norm import rms_norm

        def product(number: int, x: Tensor, **rest: Any) -> Tensor:
            weight, scale, factors, bias = self.products[number]
            return nvfp4_decode_linear(x, weight, scale, column_scale=factors, bias=bias, **rest)

        stream = product(0, attended, residual=residual)
        between = product(1, rms_norm(stream, self.norms[0], EPSILON), silu_mul=True)
        stream = product(2, between, residual=stream)
        if len(self.products) == 3:
            return [stream]
        return [stream, product(3, rms_norm(stream, self.norms[1], EPSILON))]


def given(results: tuple[Tensor, Tensor | None]) -> list[Tensor]:
    return [one for one in results if one is not None]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    """But for roundings of intermediate results that differ: sums are added in another order."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        one, other = one.double(), other.double()
        assert one.isfinite().all() and one.shape == other.shape
        assert (one - other).norm() <= 0.004 * other.norm()
        assert ((one - other).abs() <= 0.03 * other.abs() + 0.03 * other.abs().mean()).all()


@pytest.mark.parametrize(
    ("device", "shape"),
    [("cpu", shape) for shape in SHAPES[:2]]
    + [pytest.param("cuda", shape, marks=pytest.mark.gpu) for shape in SHAPES],
)
def test_a_layer_is_its_parts(kernels: Any, device: str, shape: tuple[int, ...]) -> None:
    rows, *sizes = shape
    layer = Layer(*sizes, device=device)
    inputs = layer.inputs(rows)
    expected = layer.apart(*inputs)
    assert_close(given(layer(*inputs)), expected)
    for division in ([0, 2, 2], [1, 2, 2]):
        assert_close(given(layer(*inputs, division=division)), expected)


@pytest.mark.gpu
def test_float16(kernels: Any) -> None:
    layer = Layer(1024, 2048, 5632, 3072, device="cuda", dtype=torch.float16)
    inputs = layer.inputs(2)
    assert_close(given(layer(*inputs)), layer.apart(*inputs))


@pytest.mark.gpu
def test_a_rows_result_does_not_depend_on_its_batch(kernels: Any) -> None:
    layer = Layer(1024, 2048, 5632, 3072, device="cuda")
    attended, residual = layer.inputs(8)
    everything = given(layer(attended, residual))
    for rows in (1, 2, 3, 5):
        few = given(layer(attended[:rows], residual[:rows]))
        assert_same_bits(
            tuple(one.cpu() for one in few), tuple(one[:rows].cpu() for one in everything), rows
        )


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4])
def test_a_hundred_replays_of_a_graph_of_layers_give_the_same_bits(kernels: Any, rows: int) -> None:
    """Each layer begins while the last ends, after a product of another kernel."""
    from nibble_kernels.nvfp4_linear.gpu import nvfp4_decode_linear

    layers = [Layer(1024, 2048, 5632, 3072, device="cuda", seed=seed) for seed in range(4)]
    first = layers[0].inputs(rows)
    between = Layer(2048, 1024, 1024, 0, device="cuda").products[0].weight

    def chain() -> list[Tensor]:
        attended, stream = first
        results = []
        for layer in layers:
            stream, qkv = layer(attended, stream)
            assert qkv is not None
            results += [stream, qkv]
            attended = nvfp4_decode_linear(qkv[:, :2048].contiguous(), between, 1e-5)
        return results

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = chain()
    expected = tuple(one.cpu() for one in chain())
    for _ in range(100):
        graph.replay()
        assert_same_bits(tuple(one.cpu() for one in results), expected)


def test_operators_are_registered_soundly(device: str) -> None:
    """torch's own check: schema, fake implementation, autograd registration, dynamic shapes."""
    layer = Layer(256, 512, 1024, 768, device=device)
    products = layer.products
    torch.library.opcheck(
        torch.ops.nibble.nvfp4_layer_products.default,
        (
            *layer.inputs(2),
            *layer.norms,
            EPSILON,
            [product.weight.codes for product in products],
            [product.weight.scales for product in products],
            [product.weight.rows for product in products],
            False,
            [product.global_scale for product in products],
            [product.column_scale for product in products],
            [None, None, None, products[3].bias],
            layer.meetings,
            [],
        ),
    )


def test_what_does_not_fit_is_known_before(device: str) -> None:
    from nibble_kernels.nvfp4_layer import fits

    on = torch.device(device)
    assert fits(4, 4096, (4096, 4096, 12288), on)
    assert not fits(9, 4096, (4096, 4096, 12288), on)
    assert not fits(8, 4096, (4096, 4096, 12288), on)
    assert not fits(1, 16384, (16384, 16384, 53248), on)
    assert not fits(1, 4096, (4096, 4096, 12280), on)

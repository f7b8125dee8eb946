"""nvfp4_norm_linear, nvfp4_norm_mlp and nvfp4_between_attentions beside the norms and the products
one by one. On the CPU they are their specification; on SM90 the norm writes what the products
multiply in their order, or has no kernel.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_nvfp4_gpu_linear import prepared
from torch import Tensor

from tests.support.kernels.kernel_cases import assert_same_bits, packed_weight

EPSILON = 1e-6
# Rows on both sides of each change of kernel; hidden and intermediate sizes: whole chunks, few and
# many, and others, whose x is not in order.
ROWS = (1, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 128, 129, 257, 700)
SIZES = [(256, 384), (576, 1536), (1024, 3072), (4096, 12288)]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, kernels: Any) -> str:
    assert request.param == "cpu" or kernels.implementations()["cuda"] == "compiled"
    return request.param


def layer(device: str, rows: int, columns: int, dtype: torch.dtype, *, rich: bool) -> Any:
    """rich: with factors and a bias."""
    from nibble_kernels.nvfp4_linear.norm_linear import LinearLayer

    weight = prepared(device, *packed_weight(rows, columns), native=dtype == torch.float16)
    if not rich:
        return LinearLayer(weight, 1.23e-4)
    factors, bias = torch.rand(rows) + 0.5, torch.randn(rows).to(dtype)
    return LinearLayer(weight, 1.23e-4, factors.to(device), bias.to(device))


def product(x: Tensor, of: Any, **rest: Any) -> Tensor:
    from nibble_kernels.nvfp4_linear.gpu import nvfp4_weight_linear

    weight, global_scale, column_scale, bias = of
    return nvfp4_weight_linear(
        x, weight, global_scale, column_scale=column_scale, bias=bias, **rest
    )


def close(y: Tensor, expected: Tensor) -> None:
    """Other orders of sums, and other roundings: each value of a row within a few roundings of the
    row's size.
    """
    y, expected = y.float().cpu(), expected.float().cpu()
    scale = expected.square().mean(-1, keepdim=True).sqrt()
    assert y.isfinite().all()
    assert ((y - expected).abs() <= expected.abs() * 2.0**-6 + scale * 2.0**-6).all()
    assert (y - expected).norm() <= expected.norm() * 2.0**-8


@pytest.mark.parametrize("rich", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_give_what_norm_and_products_give_one_by_one(
    device: str, dtype: torch.dtype, rich: bool
) -> None:
    from nibble_kernels.nvfp4_linear.norm_linear import Norm, nvfp4_norm_linear, nvfp4_norm_mlp
    from nibble_kernels.rms_norm import rms_norm

    torch.manual_seed(0)
    for hidden, between in SIZES if device == "cuda" else SIZES[:1]:
        norm = Norm((torch.rand(hidden) + 0.5).to(dtype).to(device), EPSILON)
        qkv = layer(device, hidden + 264, hidden, dtype, rich=rich)
        gate_up = layer(device, 2 * between, hidden, dtype, rich=rich)
        down = layer(device, hidden, between, dtype, rich=rich)
        x = torch.randn(ROWS[-1], hidden).to(dtype).to(device)
        for rows in ROWS if device == "cuda" else ROWS[:3]:
            some = x[:rows]
            normal = rms_norm(some, *norm)
            close(nvfp4_norm_linear(some, norm, qkv), product(normal, qkv))
            expected = product(product(normal, gate_up, silu_mul=True), down, residual=some)
            close(nvfp4_norm_mlp(some, norm, gate_up, down), expected)


class Layer:
    """What follows a layer's attention, whose result has `width` columns."""

    def __init__(
        self, device: str, sizes: tuple[int, int, int], dtype: torch.dtype, *, rich: bool
    ) -> None:
        from nibble_kernels.nvfp4_linear.norm_linear import Norm

        self.width, hidden, between = sizes
        self.hidden = hidden

        def norm() -> Any:
            return Norm((torch.rand(hidden) + 0.5).to(dtype).to(device), EPSILON)

        shapes = ((hidden, self.width), (2 * between, hidden), (hidden, between))
        self.o, self.gate_up, self.down = (layer(device, *one, dtype, rich=rich) for one in shapes)
        self.qkv = layer(device, hidden + 264, hidden, dtype, rich=rich)
        self.norm, self.next_norm = norm(), norm()

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.o, self.norm, self.gate_up, self.down, self.next_norm, self.qkv

    def inputs(self, rows: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
        """Attention's result and the stream."""
        attended, stream = torch.randn(rows, self.width), torch.randn(rows, self.hidden)
        return attended.to(dtype).to(device), stream.to(dtype).to(device)

    def one_by_one(self, attended: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        from nibble_kernels.rms_norm import rms_norm

        stream = product(attended, self.o, residual=stream)
        between = product(rms_norm(stream, *self.norm), self.gate_up, silu_mul=True)
        stream = product(between, self.down, residual=stream)
        return stream, product(rms_norm(stream, *self.next_norm), self.qkv)

    def exact(self, attended: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        """The same without rounding."""

        def normed(x: Tensor, norm: Any) -> Tensor:
            mean = x.square().mean(-1, keepdim=True)
            return x * (mean + norm.epsilon).rsqrt() * norm.weight.double()

        x = stream.double() + exact_product(attended.double(), self.o, attended)
        gate, up = exact_product(normed(x, self.norm), self.gate_up, stream).chunk(2, dim=-1)
        x = x + exact_product(torch.nn.functional.silu(gate) * up, self.down, stream)
        return x, exact_product(normed(x, self.next_norm), self.qkv, stream)


def exact_product(x: Tensor, of: Any, like: Tensor) -> Tensor:
    from nibble_kernels.nvfp4_linear.gpu import nvfp4_dequantize_weight

    weight, global_scale, column_scale, bias = of
    y = x @ nvfp4_dequantize_weight(weight, x.shape[-1], like).double().T * global_scale
    return y if bias is None else y * column_scale.double() + bias.double()


def as_exact(found: tuple[Tensor, ...], one: Layer, attended: Tensor, stream: Tensor) -> None:
    """Rows are on average no further from the exact result than a quarter more than what norms and
    products one by one give.
    """

    def error(y: Tensor, exact: Tensor) -> float:
        size = exact.norm(dim=-1).clamp(min=1e-30)
        return float(((y.double() - exact).norm(dim=-1) / size).square().mean().sqrt())

    known, exact = one.one_by_one(attended, stream), one.exact(attended, stream)
    for y, by_one, right in zip(found, known, exact, strict=True):
        assert y.isfinite().all()
        assert error(y, right) <= 1.25 * error(by_one, right) + 2.0**-13


# Columns of o, hidden and intermediate sizes.
LAYERS = [(272, 256, 384), (512, 576, 1536), (2048, 1024, 3072), (4096, 4096, 12288)]


@pytest.mark.parametrize("rich", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_between_attentions_is_as_exact_as_norms_and_products_one_by_one(
    device: str, dtype: torch.dtype, rich: bool
) -> None:
    from nibble_kernels.nvfp4_linear.norm_linear import nvfp4_between_attentions

    torch.manual_seed(0)
    for sizes in LAYERS if device == "cuda" else LAYERS[:1]:
        one = Layer(device, sizes, dtype, rich=rich)
        attended, stream = one.inputs(ROWS[-1], dtype, device)
        for rows in ROWS if device == "cuda" else ROWS[:3]:
            some = attended[:rows], stream[:rows]
            as_exact(nvfp4_between_attentions(*some, *one.parts), one, *some)


@pytest.mark.gpu
def test_a_float16_stream_near_its_limit_does_not_overflow(kernels: Any) -> None:
    """Times the norm's weight, without its factor, it would."""
    from nibble_kernels.nvfp4_linear.norm_linear import nvfp4_between_attentions

    torch.manual_seed(0)
    one = Layer("cuda", LAYERS[2], torch.float16, rich=False)
    one.norm.weight.fill_(2)
    for rows in (4, 9, 64):
        attended, stream = one.inputs(rows, torch.float16, "cuda")
        stream[:, ::200] = 60_000
        as_exact(nvfp4_between_attentions(attended, stream, *one.parts), one, attended, stream)


@pytest.mark.gpu
def test_a_stream_with_large_and_with_no_values_has_a_norm_too(kernels: Any) -> None:
    """As in models: some columns of a stream are a thousand times the others, or a row is zero."""
    from nibble_kernels.nvfp4_linear.norm_linear import nvfp4_between_attentions

    torch.manual_seed(0)
    one = Layer("cuda", LAYERS[2], torch.bfloat16, rich=False)
    for rows in (4, 8, 9, 32, 64):
        attended, stream = one.inputs(rows, torch.bfloat16, "cuda")
        stream[:, ::20] *= 1000
        attended[3], stream[3] = 0, 0
        found = nvfp4_between_attentions(attended, stream, *one.parts)
        as_exact(found, one, attended, stream)
        assert not any(y[3].any() for y in found)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 9, 16, 24, 32, 50, 64, 100, 300])
def test_a_hundred_repeats_have_the_same_bits_in_a_graph_too(kernels: Any, rows: int) -> None:
    from nibble_kernels.nvfp4_linear.norm_linear import (
        nvfp4_between_attentions,
        nvfp4_norm_linear,
        nvfp4_norm_mlp,
    )

    torch.manual_seed(0)
    one = Layer("cuda", LAYERS[2], torch.bfloat16, rich=False)
    attended, x = one.inputs(rows, torch.bfloat16, "cuda")

    def all_of_them() -> tuple[Tensor, ...]:
        mlp = nvfp4_norm_mlp(x, one.norm, one.gate_up, one.down)
        between = nvfp4_between_attentions(attended, x, *one.parts)
        return nvfp4_norm_linear(x, one.norm, one.qkv), mlp, *between

    first = [y.clone() for y in all_of_them()]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        all_of_them()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = all_of_them()
    for _ in range(100):
        assert_same_bits(all_of_them(), tuple(first))
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(captured, tuple(first))


@pytest.mark.gpu
def test_a_row_does_not_depend_on_the_others_of_its_bucket(kernels: Any) -> None:
    from nibble_kernels.nvfp4_linear.norm_linear import nvfp4_between_attentions, nvfp4_norm_mlp

    torch.manual_seed(0)
    one = Layer("cuda", LAYERS[2], torch.bfloat16, rich=False)
    attended, x = one.inputs(128, torch.bfloat16, "cuda")

    def both(rows: int) -> tuple[Tensor, ...]:
        between = nvfp4_between_attentions(attended[:rows], x[:rows], *one.parts)
        return nvfp4_norm_mlp(x[:rows], one.norm, one.gate_up, one.down), *between

    for least, most in ((1, 4), (5, 8), (9, 16), (17, 32), (33, 64), (65, 128)):
        everything = tuple(y[:least] for y in both(most))
        assert_same_bits(both(least), everything, (least, most))


def test_batch_invariance_takes_the_same_kernel_for_every_number_of_rows(device: str) -> None:
    from nibble_kernels.nvfp4_linear.norm_linear import Norm, nvfp4_norm_mlp

    torch.manual_seed(0)
    hidden, between, dtype = 256, 384, torch.bfloat16
    norm = Norm((torch.rand(hidden) + 0.5).to(dtype).to(device), EPSILON)
    gate_up = layer(device, 2 * between, hidden, dtype, rich=False)
    down = layer(device, hidden, between, dtype, rich=False)
    x = torch.randn(100, hidden).to(dtype).to(device)
    everything = nvfp4_norm_mlp(x, norm, gate_up, down, batch_invariant=True)
    for rows in (1, 12, 40) if device == "cuda" else (100,):
        some = nvfp4_norm_mlp(x[:rows], norm, gate_up, down, batch_invariant=True)
        assert_same_bits((some,), (everything[:rows],), rows)


def test_the_operators_are_registered_soundly(device: str) -> None:
    dtype = torch.bfloat16
    qkv = layer(device, 272, 256, dtype, rich=True)
    gate_up = layer(device, 768, 256, dtype, rich=False)
    down = layer(device, 256, 384, dtype, rich=True)
    x, norm = torch.randn(12, 256).to(dtype).to(device), torch.ones(256).to(dtype).to(device)
    ops = torch.ops.nibble
    of_qkv = (*qkv.weight, *qkv[1:])
    torch.library.opcheck(ops.nvfp4_norm_linear.default, (x, norm, EPSILON, *of_qkv, False))
    parts = [(*w[:3], *rest) for w, *rest in (gate_up, down)]
    native = gate_up.weight.native
    arguments = (x, norm, EPSILON, native, *parts[0], *parts[1], False)
    torch.library.opcheck(ops.nvfp4_norm_mlp.default, arguments)
    one = Layer(device, LAYERS[0], dtype, rich=True)
    parts = [(*w[:3], *rest) for w, *rest in (one.o, one.gate_up, one.down, one.qkv)]
    between = (*parts[0], *one.norm, *parts[1], *parts[2], *one.next_norm, *parts[3])
    inputs = one.inputs(12, dtype, device)
    torch.library.opcheck(ops.nvfp4_between_attentions.default, (*inputs, native, *between, False))

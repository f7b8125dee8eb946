"""nvfp4_norm_linear and nvfp4_norm_mlp beside the norm and the products one by one. On the CPU they
are their specification; on SM90 the norm writes what the products multiply in their order.
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


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [9, 16, 24, 32, 50, 64, 100, 300])
def test_a_hundred_repeats_have_the_same_bits_in_a_graph_too(kernels: Any, rows: int) -> None:
    from nibble_kernels.nvfp4_linear.norm_linear import Norm, nvfp4_norm_linear, nvfp4_norm_mlp

    torch.manual_seed(0)
    hidden, between, dtype = 1024, 3072, torch.bfloat16
    norm = Norm((torch.rand(hidden) + 0.5).to(dtype).cuda(), EPSILON)
    qkv, gate_up, down = (
        layer("cuda", *shape, dtype, rich=False)
        for shape in ((2048, hidden), (2 * between, hidden), (hidden, between))
    )
    x = torch.randn(rows, hidden).to(dtype).cuda()

    def both() -> tuple[Tensor, Tensor]:
        return nvfp4_norm_linear(x, norm, qkv), nvfp4_norm_mlp(x, norm, gate_up, down)

    first = [one.clone() for one in both()]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for _ in range(100):
        assert_same_bits(tuple(both()), tuple(first))
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(captured, tuple(first))


@pytest.mark.gpu
def test_a_row_does_not_depend_on_the_others_of_its_bucket(kernels: Any) -> None:
    from nibble_kernels.nvfp4_linear.norm_linear import Norm, nvfp4_norm_mlp

    torch.manual_seed(0)
    hidden, between, dtype = 1024, 3072, torch.bfloat16
    norm = Norm((torch.rand(hidden) + 0.5).to(dtype).cuda(), EPSILON)
    gate_up = layer("cuda", 2 * between, hidden, dtype, rich=False)
    down = layer("cuda", hidden, between, dtype, rich=False)
    x = torch.randn(128, hidden).to(dtype).cuda()
    for least, most in ((9, 16), (17, 32), (33, 64), (65, 128)):
        everything = nvfp4_norm_mlp(x[:most], norm, gate_up, down)
        some = nvfp4_norm_mlp(x[:least], norm, gate_up, down)
        assert_same_bits((some,), (everything[:least],), (least, most))


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

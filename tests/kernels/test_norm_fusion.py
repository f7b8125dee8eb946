"""Norms and residual sums in products: the pass over vLLM's graphs, on graphs of the operators that vLLM records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_cases import packed_weight
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

pytestmark = pytest.mark.vllm
HIDDEN, TOKENS, EPSILON = 64, 5, 1e-6
NONE_YET = (None, None, None, None, 0.0)  # column scale, bias, residual, norm


@pytest.fixture(scope="module")
def product(kernels: object) -> Callable[..., Tensor]:
    """product(x, silu_mul=False): nvfp4_weight_linear with a weight of as many rows as columns."""
    import vllm.ir.ops  # noqa: F401  (its operators)
    from nibble_kernels.nvfp4_linear.gpu import LINEAR
    from nibble_kernels.nvfp4_linear.weight import prepare_weight

    made = {rows: prepare_weight(*packed_weight(rows, HIDDEN), native=False) for rows in (HIDDEN, 2 * HIDDEN)}

    def call(x: Tensor, silu_mul: bool = False) -> Tensor:
        return LINEAR(x, *made[HIDDEN * (1 + silu_mul)], 1e-4, *NONE_YET, silu_mul, False, None, 0)

    return call


def norm_of_sum(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.vllm_ir.fused_add_rms_norm.default(x, residual, weight, EPSILON)


def fused(f: Callable[..., Any], *inputs: Tensor) -> tuple[fx.GraphModule, list[Tensor], list[Tensor]]:
    """The graph after the pass, and what it gives beside what it gave before."""
    from nibble_kernels.vllm_plugin.fusion import FuseNorms

    module = make_fx(f)(*inputs)
    before = module(*inputs)
    FuseNorms()(module.graph)
    module.graph.lint()
    module.recompile()
    after = module(*inputs)
    return module, list(before), list(after)


def inputs(count: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(TOKENS, HIDDEN).bfloat16() for _ in range(count)]


def weights() -> list[Tensor]:
    torch.manual_seed(2)
    return [(1 + 0.2 * torch.randn(HIDDEN)).bfloat16() for _ in range(2)]


def names(module: fx.GraphModule) -> list[str]:
    """The operators of a graph in their order, products with what they took over."""
    from nibble_kernels.vllm_plugin.fusion import NORM_WEIGHT, RESIDUAL, is_product

    found = []
    for node in module.graph.nodes:
        if is_product(node):
            parts = (
                ["norm"] * bool(node.args[NORM_WEIGHT]) + ["product"] + ["sum"] * bool(node.args[RESIDUAL])
            )
            found.append(" ".join(parts))
        elif node.op == "call_function" and "vllm_ir" in str(node.target):
            found.append(str(node.target).split(".")[1])
        elif node.target is torch.ops.aten.add.Tensor:
            found.append("add")
    return found


def assert_close(before: list[Tensor], after: list[Tensor]) -> None:
    """As far as one rounding of the residual stream goes."""
    for one, other in zip(before, after, strict=True):
        difference = (one.double() - other.double()).norm() / one.double().norm()
        assert difference < 0.01, difference


def test_between_two_attentions_no_norm_and_no_sum_is_left(product: Callable[..., Tensor]) -> None:
    def between(attention: Tensor, residual: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        normed, residual = norm_of_sum(product(attention), residual, first)
        hidden = product(normed, silu_mul=True)
        normed, residual = norm_of_sum(product(hidden), residual, second)
        return product(normed), residual

    module, before, after = fused(between, *inputs(2), *weights())
    assert names(module) == ["product sum", "norm product", "product sum", "norm product"]
    assert_close(before, after)


def test_a_sum_of_what_is_no_product_stays_a_sum(product: Callable[..., Tensor]) -> None:
    """As with tensor parallelism, where ranks' parts are added up before."""

    def piece(x: Tensor, residual: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        normed, residual = norm_of_sum(2 * product(x), residual, first)
        return product(normed), residual

    module, before, after = fused(piece, *inputs(2), weights()[0])
    assert names(module) == ["product", "add", "norm product"]
    assert_close(before, after)


def test_a_product_that_something_else_reads_keeps_its_result(product: Callable[..., Tensor]) -> None:
    def piece(x: Tensor, residual: Tensor, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = product(x)
        normed, residual = norm_of_sum(made, residual, first)
        return product(normed), residual, made

    module, before, after = fused(piece, *inputs(2), weights()[0])
    assert names(module) == ["product", "add", "norm product"]
    assert_close(before, after)


def test_a_norm_that_something_else_reads_stays(product: Callable[..., Tensor]) -> None:
    """As where adapters read it, a router, or the model's head."""

    def piece(x: Tensor, residual: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normed, residual = norm_of_sum(product(x), residual, first)
        last, residual = norm_of_sum(product(normed), residual, second)
        return normed + 1, residual, last

    module, before, after = fused(piece, *inputs(2), *weights())
    assert [name for name in names(module) if name != "add"] == [
        "product", "fused_add_rms_norm", "product", "fused_add_rms_norm",
    ]  # fmt: skip
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_the_first_norm_has_no_sum_before_it(product: Callable[..., Tensor]) -> None:
    def piece(x: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        return product(torch.ops.vllm_ir.rms_norm.default(x, first, EPSILON)), x

    module, before, after = fused(piece, *inputs(1), weights()[0])
    assert names(module) == ["norm product"]
    assert_close(before, after)

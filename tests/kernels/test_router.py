"""nibble::route_experts and norm_route_experts: the specification, and the kernel on a GPU."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.changes import OPERATORS
from tests.support.kernels.kernel_build import KERNELS
from tests.support.kernels.router_cases import check, make_case, run

pytestmark = pytest.mark.when_changed(*OPERATORS)

# Qwen3-30B-A3B, Qwen3.6-35B-A3B, Qwen3-Next, Qwen3.5-397B, Nemotron 3 Nano, and sizes of no model.
SHAPES = [
    (128, 2048, 8),
    (256, 2048, 8),
    (512, 2048, 10),
    (512, 4096, 10),
    (128, 2688, 6),
    (60, 1056, 4),
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, kernels: Any) -> str:
    assert request.param == "cpu" or kernels.implementations()["cuda"] == "compiled"
    return request.param


@pytest.fixture
def cuda(kernels: Any) -> None:
    assert kernels.implementations()["cuda"] == "compiled"


def assert_equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("with_norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("tokens", [1, 3, 8, 17, 64, 128, 129, 200])
@pytest.mark.parametrize(("experts", "columns", "topk"), SHAPES)
def test_every_shape(
    device: str, experts: int, columns: int, topk: int, tokens: int, with_norm: bool
) -> None:
    """Also with a shared expert's gate, and with norm, product and choice apart."""
    from nibble_kernels.router import APART

    case = make_case(
        tokens, experts, columns, topk, with_norm=with_norm, with_shared_gate=with_norm, seed=tokens
    )
    check(run(case.to(device)), case)
    if device == "cuda":
        check(run(case.to(device), division=APART), case)


OPTIONS: list[dict[str, Any]] = [
    {"renormalize": False},
    {"round_logits": False, "scale": 2.5},
    {"sigmoid": True, "bias": torch.linspace(-1, 1, 128), "scale": 1.5},
    {"bias": torch.linspace(0.1, -0.1, 128), "renormalize": False},
    {"padding": torch.arange(12) % 3 == 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
def test_options(device: str, options: dict[str, Any]) -> None:
    from nibble_kernels.router import APART

    case = make_case(12, 128, 1024, 6, with_norm=True, norm_offset=1.0, **options)
    check(run(case.to(device)), case)
    if device == "cuda":
        check(run(case.to(device), division=APART), case)


def test_of_equal_experts_the_first_are_chosen(device: str) -> None:
    case = make_case(2, 64, 256, 8)
    case.gate[:] = case.gate[0]
    case.gate[[5, 6, 40]] *= 2
    case.x[:] = case.gate[0]
    assert run(case.to(device))[1].tolist() == [[5, 6, 40, 0, 1, 2, 3, 4]] * 2


def test_no_tokens(device: str) -> None:
    found = run(make_case(0, 64, 256, 8, with_norm=True, with_shared_gate=True).to(device))
    assert [tuple(one.shape) for one in found] == [(0, 8), (0, 8), (0, 256), (0, 256), (0, 1)]


def test_what_the_kernel_does_not_take_is_named(kernels: Any) -> None:
    """The plain torch code takes all; the kernel's limits are the module's."""
    from nibble_kernels import router

    header = (KERNELS / "src/nibble_kernels/router/problem.h").read_text()
    limits = f"kMostExperts = {router.MAX_EXPERTS}, kMostChosen = {router.MAX_CHOSEN}, kMostColumns"
    assert f"{limits} = {router.MAX_COLUMNS}" in header
    assert f"kMostTokensAtOnce = {router.MAX_TOKENS_AT_ONCE};" in header


@pytest.mark.gpu
@pytest.mark.parametrize("with_norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize(("experts", "columns", "topk"), SHAPES)
def test_a_token_has_the_same_bits_in_every_batch(
    cuda: None, experts: int, columns: int, topk: int, with_norm: bool
) -> None:
    """Of those that one launch takes; the norm's results in every batch."""
    from nibble_kernels.router import APART, MAX_TOKENS_AT_ONCE

    case = make_case(300, experts, columns, topk, with_norm=with_norm, with_shared_gate=with_norm)
    case = case.to("cuda")
    expected = run(case, division=(1, 8))
    for groups, ranks in ((1, 1), (2, 2), (2, 8), (4 if columns <= 2048 else 2, 4)):
        assert_equal(run(case, division=(groups, ranks)), expected)
    at_once = not with_norm or experts * columns <= 1 << 20
    for size in (1, 3, 4, 5, 8, 33, 64, 128):
        part = slice(100, 100 + size)
        same = 0 if at_once and size <= MAX_TOKENS_AT_ONCE else 2
        found = run(case.rows(part))
        assert_equal(found[same:], tuple(one[part] for one in expected)[same:])
    assert_equal(run(case, division=APART)[2:], expected[2:])
    many = make_case(3000, experts, columns, topk, with_norm=with_norm).to("cuda")
    assert_equal(run(many.rows(slice(0, 7)))[2:], tuple(one[:7] for one in run(many))[2:])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 6, 40, 200])
def test_chained_calls_in_a_graph_have_the_bits_of_calls_one_by_one(
    cuda: None, tokens: int
) -> None:
    """Each call begins while the one before it ends, 100 times."""
    case = make_case(tokens, 128, 2048, 8, with_norm=True, with_shared_gate=True).to("cuda")
    gates = torch.randn(12, 128, 2048, device="cuda", dtype=torch.bfloat16) / 45
    torch.cuda.synchronize()

    def chain(wait: bool) -> list[Tensor]:
        now, results = case, []
        for gate in gates:
            found = run(replace(now, gate=gate))
            if wait:
                torch.cuda.synchronize()
            now = replace(now, x=found[2], residual=found[3])
            results += found
        return results

    expected = chain(wait=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        chain(wait=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = chain(wait=False)
    for _ in range(100):
        for one in results:
            one.zero_()
        graph.replay()
        assert_equal(tuple(results), tuple(expected))


def load_vllm_topk() -> bool:
    """vLLM's topk_softmax and topk_sigmoid, without vLLM. False if there are none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return False
    found = sorted(Path(spec.origin).parent.glob("_moe_C*.so"))
    for path in found:
        torch.ops.load_library(path)
    return bool(found)


@pytest.mark.gpu
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("experts", "columns", "topk"), SHAPES[:4])
def test_vllm_chooses_the_same(
    cuda: None, experts: int, columns: int, topk: int, renormalize: bool, scoring: str
) -> None:
    """The same ids in the same order, also of equal logits, in every row where the order of a sum
    does not decide how a logit that matters is rounded.
    """
    if not load_vllm_topk():
        pytest.skip("no compiled vLLM here")
    sigmoid = scoring == "sigmoid"
    case = make_case(512, experts, columns, topk, renormalize=renormalize, sigmoid=sigmoid)
    case = case.to("cuda")
    weights, ids = run(case)
    logits = torch.nn.functional.linear(case.x, case.gate)
    theirs = torch.empty_like(weights), torch.empty_like(ids), torch.empty_like(ids)
    if sigmoid:
        torch.ops._moe_C.topk_sigmoid(*theirs, logits, renormalize, None, 1.0, None)
    else:
        torch.ops._moe_C.topk_softmax(*theirs, logits, renormalize, None, None)
    exact = case.x.double() @ case.gate.double().T
    margin = (case.x.double().abs() @ case.gate.double().abs().T) * 2.0**-20
    unsure = (exact - margin).bfloat16() != (exact + margin).bfloat16()
    last = exact.topk(topk).values[:, -1:]
    clear = ~(unsure & (exact >= last - last.abs() * 2.0**-6)).any(-1)
    assert clear.sum() >= 100
    assert torch.equal(ids[clear], theirs[1][clear])
    torch.testing.assert_close(weights[clear], theirs[0][clear], rtol=0.02, atol=1e-6)
    assert (ids == theirs[1]).float().mean() > 0.98

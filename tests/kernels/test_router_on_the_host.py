"""The router's own source without a GPU: compiled by g++, with lanes that take turns.

Only the instructions are stood in for (emulator/nibble/tensor_core.cuh).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.changes import OPERATORS
from tests.support.kernels.emulated import compile_on_the_host, needs_compiler
from tests.support.kernels.router_cases import Case, check, make_case, run

Route = Callable[..., tuple[Tensor, ...]]

pytestmark = [
    needs_compiler,
    pytest.mark.when_changed(*OPERATORS),
]

POINTERS = (
    *("x", "residual", "norm", "normed", "sum", "gate", "shared_gate", "shared_factors"),
    *("logits", "bias", "padding", "weights", "ids"),
)
SIZES = ("tokens", "experts", "columns", "topk")
FACTORS = ("epsilon", "norm_offset", "scale")
FLAGS = ("sigmoid", "renormalize", "round_logits")


class Problem(ctypes.Structure):
    """problem.h"""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_uint32) for name in SIZES),
        *((name, ctypes.c_float) for name in FACTORS),
        *((name, ctypes.c_bool) for name in FLAGS),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    found = compile_on_the_host("router.cpp", tmp_path_factory.mktemp("emulator"), e2m1=True)
    assert found.problem_bytes() == ctypes.sizeof(Problem)
    return found


@pytest.fixture(params=["early", "late"])
def route(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Route:
    def call(
        case: Case, *, groups: int = 1, ranks: int = 1, apart: bool = False
    ) -> tuple[Tensor, ...]:
        kept = tensors_of(case)
        values: dict[str, Any] = {
            name: tensor.data_ptr() for name, tensor in kept.items() if tensor is not None
        }
        options = {"sigmoid": False, "renormalize": True, "round_logits": True} | case.options
        late = request.param == "late"
        problem = Problem(
            **values,
            tokens=len(case.x),
            experts=len(case.gate),
            columns=case.x.shape[1],
            topk=case.topk,
            epsilon=case.epsilon,
            norm_offset=case.norm_offset,
            scale=options.get("scale", 1.0),
            **{name: options[name] for name in FLAGS},
        )
        if apart:
            if case.residual is not None:
                library.norm_on_the_host(ctypes.byref(problem), late)
            rows = case.x if case.residual is None else kept["normed"]
            logits = logits_of(rows, case.gate, options["round_logits"])
            problem.logits = logits.data_ptr()
            library.choose_on_the_host(ctypes.byref(problem), late)
        else:
            library.route_on_the_host(ctypes.byref(problem), groups, ranks, late)
        found = (kept["weights"], kept["ids"])
        if case.residual is not None:
            found += (kept["normed"], kept["sum"])
        return found if case.shared_gate is None else (*found, kept["shared_factors"])

    return call


def logits_of(x: Tensor, gate: Tensor, round_logits: bool) -> Tensor:
    """As torch's product gives them: bfloat16, or float32."""
    logits = x.float() @ gate.float().T
    return logits.bfloat16() if round_logits else logits


def tensors_of(case: Case) -> dict[str, Any]:
    tokens = len(case.x)
    written = {
        "weights": torch.full((tokens, case.topk), float("nan")),
        "ids": torch.full((tokens, case.topk), -7, dtype=torch.int32),
    }
    if case.residual is not None:
        unwritten = torch.full_like(case.x, float("nan"))
        written |= {"normed": unwritten, "sum": unwritten.clone()}
    if case.shared_gate is not None:
        written["shared_factors"] = torch.full((tokens, 1), float("nan"), dtype=case.x.dtype)
    given = {"x": case.x, "residual": case.residual, "norm": case.norm, "gate": case.gate}
    given["shared_gate"] = case.shared_gate
    options = {name: case.options.get(name) for name in ("bias", "padding")}
    return written | given | options


@pytest.mark.parametrize("apart", [False, True], ids=["", "apart"])
@pytest.mark.parametrize("with_norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize(
    ("tokens", "experts", "columns", "topk", "groups", "ranks"),
    [
        (1, 128, 2048, 8, 1, 8),
        (9, 128, 544, 8, 1, 2),
        (3, 256, 2048, 8, 1, 8),
        (11, 60, 1056, 4, 2, 4),
        (30, 128, 512, 6, 4, 1),
        (5, 512, 4096, 10, 1, 8),
        (17, 512, 2080, 10, 2, 2),
    ],
)
def test_shapes_and_divisions(
    route: Route,
    tokens: int,
    experts: int,
    columns: int,
    topk: int,
    groups: int,
    ranks: int,
    with_norm: bool,
    apart: bool,
) -> None:
    """Also with a shared expert's gate."""
    case = make_case(
        tokens, experts, columns, topk, with_norm=with_norm, with_shared_gate=with_norm, seed=tokens
    )
    check(route(case, groups=groups, ranks=ranks, apart=apart), case)


OPTIONS: list[dict[str, Any]] = [
    {"renormalize": False},
    {"round_logits": False, "scale": 2.5},
    {"sigmoid": True},
    {"sigmoid": True, "renormalize": False, "scale": 0.5},
    {"sigmoid": True, "bias": torch.linspace(-1, 1, 64), "scale": 1.5},
    {"bias": torch.linspace(0.1, -0.1, 64)},
    {"padding": torch.tensor([False, True, False, True])},
]


@pytest.mark.parametrize("apart", [False, True], ids=["", "apart"])
@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
def test_options(route: Route, options: dict[str, Any], apart: bool) -> None:
    case = make_case(4, 64, 256, 6, **options)
    check(route(case, ranks=2, apart=apart), case)


@pytest.mark.parametrize("apart", [False, True], ids=["", "apart"])
def test_a_norm_with_an_offset(route: Route, apart: bool) -> None:
    case = make_case(3, 64, 512, 4, with_norm=True, norm_offset=1.0)
    check(route(case, ranks=2, apart=apart), case)


@pytest.mark.parametrize("columns", [512, 1056, 2048, 4096])
def test_the_norm_and_the_shared_gate_have_the_same_bits_apart(route: Route, columns: int) -> None:
    case = make_case(11, 64, columns, 4, with_norm=True, with_shared_gate=True, norm_offset=1.0)
    at_once, apart = route(case, groups=2, ranks=2), route(case, apart=True)
    assert all(torch.equal(a, b) for a, b in zip(at_once[2:], apart[2:], strict=True))


def test_a_number_of_experts_that_is_not_in_fours(route: Route) -> None:
    for round_logits in (False, True):
        case = make_case(3, 61, 256, 5, round_logits=round_logits)
        check(route(case, apart=True), case)


def test_of_equal_experts_the_first_are_chosen(route: Route) -> None:
    """Also where a lane has several of them, and where all are equal."""
    case = make_case(2, 64, 256, 8, round_logits=False)
    case.gate[:] = case.gate[0]
    _, ids = route(case, ranks=4)
    assert ids.tolist() == [list(range(8))] * 2
    case.gate[[5, 6, 40]] *= 2
    case.x[:] = case.gate[0]
    _, ids = route(case, ranks=4)
    assert ids.tolist() == [[5, 6, 40, 0, 1, 2, 3, 4]] * 2


def test_all_experts_and_one_expert(route: Route) -> None:
    for topk in (1, 32):
        case = make_case(2, 32, 128, topk)
        check(route(case), case)


def test_infinite_and_missing_logits_leave_ids_of_experts(route: Route) -> None:
    case = make_case(3, 128, 256, 8)
    case.x[0, 3], case.x[1], case.x[2, 0] = float("inf"), float("nan"), -float("inf")
    _, ids = route(case, ranks=2)
    assert ((ids >= 0) & (ids < 128)).all() and all(len(row.unique()) == 8 for row in ids)


@pytest.mark.parametrize("with_norm", [False, True], ids=["", "norm"])
def test_a_token_has_the_same_bits_in_every_division(route: Route, with_norm: bool) -> None:
    case = make_case(19, 96, 1056, 5, with_norm=with_norm, with_shared_gate=with_norm)
    expected = route(case, groups=1, ranks=1)
    for groups, ranks in ((2, 4), (4, 1), (1, 8)):
        found = route(case, groups=groups, ranks=ranks)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    alone = route(case.rows(slice(7, 8)), ranks=2)
    assert all(torch.equal(a, b[7:8]) for a, b in zip(alone, expected, strict=True))


def test_the_specification_agrees_with_the_kernel(route: Route, kernels: object) -> None:
    bias = torch.linspace(0, 0.01, 128)
    case = make_case(6, 128, 512, 8, with_norm=True, with_shared_gate=True, bias=bias)
    check(run(case), case)
    assert torch.equal(route(case, ranks=4)[1], run(case)[1])

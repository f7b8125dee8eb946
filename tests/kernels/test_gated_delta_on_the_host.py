"""A step of the gated delta rule, the kernel's own source without a GPU: compiled by g++, with
lanes that take turns.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from tests.support.changes import OPERATORS
from tests.support.kernels.emulated import compile_on_the_host, needs_compiler
from tests.support.kernels.gated_delta_cases import (
    CASES,
    HEAD,
    PROMPTS,
    Case,
    check,
    expected,
    make_case,
    make_prompts,
)

pytestmark = [
    needs_compiler,
    pytest.mark.when_changed(*OPERATORS),
]

POINTERS = (
    *("x", "gates", "qkvz", "conv_weight", "conv_state", "state", "slots"),
    *("a_log", "dt_bias", "norm", "out"),
)
STRIDES = (
    *("qkvz_stride", "conv_slot_stride", "conv_channel_stride", "conv_token_stride"),
    "state_slot_stride",
)
SIZES = ("tokens", "live_tokens", "columns", "key_heads", "value_heads", "slot_stride")
STATES = [torch.float32, torch.bfloat16]


class Problem(ctypes.Structure):
    """problem.h"""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in STRIDES),
        *((name, ctypes.c_uint32) for name in SIZES),
        ("epsilon", ctypes.c_float),
        ("is_interleaved", ctypes.c_uint32),
        ("is_sigmoid", ctypes.c_uint32),
    )


class Prompts(ctypes.Structure):
    """problem.h"""

    _fields_ = (
        ("p", Problem),
        *(
            (name, ctypes.c_void_p)
            for name in ("starts", "has_state", "ba", "convolved", "factors")
        ),
        ("sequences", ctypes.c_uint32),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    found = compile_on_the_host("gated_delta.cpp", tmp_path_factory.mktemp("emulator"))
    assert found.problem_bytes() == ctypes.sizeof(Problem)
    assert found.prompts_bytes() == ctypes.sizeof(Prompts)
    return found


def problem_of(case: Case) -> Problem:
    t, conv = case.tensors, case.tensors["conv_state"]
    heads = len(t["a_log"])
    pointers: dict[str, Any] = {name: t[name].data_ptr() for name in POINTERS}
    return Problem(
        **pointers,
        qkvz_stride=t["qkvz"].stride(0),
        conv_slot_stride=conv.stride(0),
        conv_channel_stride=conv.stride(1),
        conv_token_stride=conv.stride(2),
        state_slot_stride=t["state"].stride(0),
        tokens=len(t["x"]),
        live_tokens=case.options.get("live_tokens", len(t["slots"])),
        columns=t["x"].shape[1],
        key_heads=(len(t["conv_weight"]) // HEAD - heads) // 2,
        value_heads=heads,
        slot_stride=t["slots"].stride(0),
        epsilon=case.options["epsilon"],
        is_interleaved=case.options["interleaved"],
        is_sigmoid=case.options["sigmoid"],
    )


def run(
    library: ctypes.CDLL, case: Case, is_late: bool = False, multiprocessors: int = 132
) -> Case:
    """The case after the call, in the form for so many multiprocessors."""
    result = case.on("cpu")
    t = result.tensors
    is_float = t["state"].dtype == torch.float32
    problem = problem_of(result)
    if not result.is_prompts:
        library.step_on_the_host(ctypes.byref(problem), is_float, is_late, multiprocessors)
        return result
    scratch = {
        "ba": (t["x"].float() @ t["gates"].float().T).bfloat16(),
        "convolved": torch.full((len(t["x"]), len(t["conv_weight"])), float("nan")).bfloat16(),
        "factors": torch.full((len(t["x"]), 2 * problem.key_heads), float("nan")),
    }
    given = {name: t[name] for name in ("starts", "has_state")} | scratch
    pointers: dict[str, Any] = {name: one.data_ptr() for name, one in given.items()}
    prompts = Prompts(p=problem, sequences=len(t["slots"]), **pointers)
    library.prompts_on_the_host(ctypes.byref(prompts), is_float, is_late)
    return result


@pytest.mark.parametrize("state", STATES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", CASES, ids=lambda form: "-".join(map(str, form.values())))
def test_a_step_is_the_definition(
    library: ctypes.CDLL, form: dict[str, Any], state: torch.dtype
) -> None:
    case = make_case(**form, state=state)
    for is_late in (False, True):
        check(run(library, case, is_late), expected(case))
    found, other = run(library, case).tensors, run(library, case, multiprocessors=0).tensors
    for name in ("out", "state", "conv_state"):
        assert found[name].equal(other[name]), name


@pytest.mark.parametrize("state", STATES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", PROMPTS, ids=lambda form: "-".join(map(str, form.values())))
def test_prompts_are_the_definition(
    library: ctypes.CDLL, form: dict[str, Any], state: torch.dtype
) -> None:
    case = make_prompts(**form, state=state)
    for is_late in (False, True):
        check(run(library, case, is_late), expected(case))


def test_a_token_without_a_slot_gives_0_and_touches_no_state(library: ctypes.CDLL) -> None:
    case = make_case(4, 1, 2, 64, padded=3)
    case.tensors["state"][0] = float("nan")  # slot 0, and those of no sequence
    found, used = run(library, case).tensors, case.tensors["slots"].tolist()
    assert used[1] == 0
    assert len(used) == 2
    assert not found["out"][1:].any()
    assert found["out"][0].isfinite().all()
    for name in ("state", "conv_state"):
        for slot in set(range(len(case.tensors[name]))) - set(used):
            assert found[name][slot].equal(case.tensors[name][slot])


def test_a_tokens_bits_do_not_depend_on_the_others(library: ctypes.CDLL) -> None:
    case = make_case(3, 1, 2, 256, state=torch.bfloat16)
    together = run(library, case).tensors
    alone = case.on("cpu")
    for name in ("x", "qkvz", "slots", "out"):
        alone.tensors[name] = alone.tensors[name][1:2].contiguous()
    found = run(library, alone, multiprocessors=1).tensors
    slot = int(alone.tensors["slots"][0])
    assert found["out"][0].equal(together["out"][1])
    assert found["state"][slot].equal(together["state"][slot])

"""The kernel before attention, its own source without a GPU: compiled by g++, with lanes that take
turns. Its results are those of the specification, bit for bit.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.changes import OPERATORS
from tests.support.kernels.emulated import compile_on_the_host, needs_compiler
from tests.support.kernels.front_cases import Case, cases, make_case, raw, specified

pytestmark = [
    needs_compiler,
    pytest.mark.when_changed(*OPERATORS),
]

POINTERS = (
    *("qkv", "q_weight", "k_weight", "cos_sin", "positions", "slots"),
    *("k_scale", "v_scale", "q_scale", "q", "cache"),
)
STRIDES = ("qkv_stride", "page_stride", "token_stride", "head_stride")
SIZES = ("tokens", "slot_count", "heads", "kv_heads", "rotary", "tokens_per_page")


class Problem(ctypes.Structure):
    """front.cuh"""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in STRIDES),
        *((name, ctypes.c_uint32) for name in SIZES),
        ("epsilon", ctypes.c_float),
        ("is_neox", ctypes.c_uint32),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    found = compile_on_the_host(
        "attention_front.cpp", tmp_path_factory.mktemp("emulator"), e2m1=True
    )
    assert found.problem_bytes() == ctypes.sizeof(Problem)
    return found


def run(library: ctypes.CDLL, case: Case, is_late: bool) -> tuple[Tensor, Tensor]:
    """(queries, cache) after the call. What the kernel does not write stays as it was."""
    tokens, size = len(case.qkv), case.cache.element_size()
    cache = case.on("cpu").cache
    dtype = torch.bfloat16 if case.q_scale is None else torch.float8_e4m3fn
    q = torch.full((tokens, case.heads, case.head_dim), float("nan")).to(dtype)
    given: dict[str, Any] = {
        "qkv": case.qkv,
        "cos_sin": case.cos_sin,
        "positions": case.positions,
        "slots": case.slots,
        "q_scale": case.q_scale,
        "q": q,
        "cache": cache,
        **{name: case.norms.get(name) for name in ("q_weight", "k_weight")},
        **case.scales,
    }
    pointers: dict[str, Any] = {
        name: tensor.data_ptr() for name, tensor in given.items() if tensor is not None
    }
    problem = Problem(
        **pointers,
        qkv_stride=case.qkv.stride(0),
        page_stride=cache.stride(0) * size,
        head_stride=cache.stride(1) * size,
        token_stride=cache.stride(2) * size,
        tokens=tokens,
        slot_count=len(case.slots),
        heads=case.heads,
        kv_heads=case.kv_heads,
        rotary=case.cos_sin.shape[1],
        tokens_per_page=cache.shape[2],
        epsilon=case.norms.get("epsilon", 0.0),
        is_neox=case.neox,
    )
    library.prepare_on_the_host(ctypes.byref(problem), case.head_dim, case.is_fp8, is_late)
    return q, cache


@pytest.mark.parametrize("is_late", [False, True], ids=["in order", "last first"])
def test_every_size_and_option_is_the_specification(library: ctypes.CDLL, is_late: bool) -> None:
    for case in cases():
        q, cache = run(library, case, is_late)
        expected, expected_cache = specified(case)
        assert torch.equal(raw(q), raw(expected))
        assert torch.equal(raw(cache), raw(expected_cache))
        assert not torch.equal(raw(cache), raw(case.cache)), "no key was written"


def test_without_a_slot_the_cache_stays(library: ctypes.CDLL) -> None:
    case = make_case(4, fp8=True)
    case.slots = torch.full((4,), -1)
    q, cache = run(library, case, False)
    assert torch.equal(raw(cache), raw(case.cache))
    assert torch.equal(raw(q), raw(specified(case)[0]))


def test_numbers_beyond_fp8_are_its_largest(library: ctypes.CDLL) -> None:
    case = make_case(3, fp8=True, norms=False, rounds_queries=True)
    case.scales = {"k_scale": torch.tensor([1e-3]), "v_scale": torch.tensor([1e-4])}
    case.q_scale = torch.tensor([1e-3])
    q, cache = run(library, case, False)
    assert torch.equal(raw(q), raw(specified(case)[0]))
    assert torch.equal(raw(cache), raw(specified(case)[1]))
    assert float(q.float().abs().max()) == 448

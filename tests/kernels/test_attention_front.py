"""nibble::attention_front: the specification everywhere; on a GPU the kernel, bit for bit the
specification and vLLM's own kernels one after the other.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels.front_cases import Case, cases, make_case, raw, specified

FORMS: tuple[dict[str, Any], ...] = (
    {"kv_heads": 8},
    {"kv_heads": 8, "norms": False, "neox": False},
    {"kv_heads": 4, "head_dim": 256, "rotary": 64},
    {"kv_heads": 8, "head_dim": 64},
)
MANY = [
    {"tokens": tokens, "fp8": fp8, "heads": 32, "rounds_queries": fp8, **form}
    for tokens in (1, 64, 300)
    for fp8 in (False, True)
    for form in FORMS
]
CHAIN = (32, 8), (16, 8), (8, 4)  # heads and KV heads of calls, each of the queries before it


def front(case: Case) -> tuple[Tensor, Tensor]:
    """(queries, cache) after the call."""
    from nibble_kernels.attention_front import attention_front

    cache = case.on(str(case.qkv.device)).cache
    q = attention_front(
        case.qkv, case.positions, case.cos_sin, cache=cache, slots=case.slots, **case.options()
    )
    return q.view(len(q), case.heads, case.head_dim), cache


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for name, one, other in zip(("queries", "cache"), found, expected, strict=True):
        assert one.dtype == other.dtype
        differing = (raw(one) != raw(other)).sum()
        assert not differing, f"{differing} of {raw(one).numel()} bytes of the {name} differ"


def test_the_plain_torch_code_is_the_specification(kernels: ModuleType) -> None:
    for case in cases():
        assert_same(front(case), specified(case))


def test_the_specification_is_norm_then_rotation(kernels: ModuleType) -> None:
    """Against complex numbers in float64."""
    case = make_case(6, rotary=64, norms=True)
    q = front(case)[0].double()
    x = case.qkv.double().view(6, -1, 128)[:, :8]
    weight = case.norms["q_weight"].double()
    x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    cosines, sines = case.cos_sin[case.positions].double().unsqueeze(1).chunk(2, dim=-1)
    turned = torch.complex(x[..., :32], x[..., 32:64]) * torch.complex(cosines, sines)
    expected = torch.cat((turned.real, turned.imag, x[..., 64:]), dim=-1)
    torch.testing.assert_close(q, expected, atol=2e-2, rtol=2**-7)


def test_without_a_cache_there_are_queries(kernels: ModuleType) -> None:
    from nibble_kernels.attention_front import attention_front

    case = make_case(4)
    q = attention_front(case.qkv, case.positions, case.cos_sin, **case.options())
    assert torch.equal(q.view(4, 8, 128), specified(case)[0])


@pytest.mark.gpu
def test_the_kernel_is_the_specification(kernels: ModuleType) -> None:
    for case in [*cases(), *(make_case(**form) for form in MANY)]:
        on_gpu = case.on("cuda")
        assert_same(front(on_gpu), specified(on_gpu))


@pytest.mark.gpu
@pytest.mark.parametrize("form", MANY, ids=str)
def test_the_kernel_is_vllms_kernels(kernels: ModuleType, form: dict[str, Any]) -> None:
    for heads_first in (False, True):
        case = make_case(**form, heads_first=heads_first).on("cuda")
        assert_same(front(case), of_vllm(case))


def of_vllm(case: Case) -> tuple[Tensor, Tensor]:
    """What vLLM's own kernels give, one after the other."""
    ops = pytest.importorskip("vllm._custom_ops")
    by_head = case.qkv.unflatten(1, (-1, case.head_dim))
    q, k, v = by_head.split([case.heads, case.kv_heads, case.kv_heads], dim=1)
    normed = []
    for x, name in ((q, "q_weight"), (k, "k_weight")):
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if case.norms:
            ops.rms_norm(out, x, case.norms[name], case.norms["epsilon"])
        else:
            out.copy_(x)
        normed.append(out.flatten(1))
    q, k = normed
    ops.rotary_embedding(case.positions, q, k, case.head_dim, case.cos_sin, case.neox)
    cache = case.on("cuda").cache
    stored = cache.view(torch.uint8) if case.is_fp8 else cache
    keys, values = stored.transpose(1, 2).split(case.head_dim, dim=-1)
    one = torch.ones(1, device="cuda")
    ops.reshape_and_cache_flash(
        k.unflatten(1, (case.kv_heads, -1)), v, keys, values, case.slots,
        "fp8" if case.is_fp8 else "auto",
        case.scales.get("k_scale", one), case.scales.get("v_scale", one),
    )  # fmt: skip
    if case.q_scale is not None:
        q, _ = ops.scaled_fp8_quant(q, case.q_scale, group_shape=(-1, -1))
    return q.unflatten(1, (case.heads, -1)), cache


@pytest.mark.gpu
def test_a_hundred_replays_of_a_chain_are_equal(kernels: ModuleType) -> None:
    """Each call reads what the one before it wrote, and may begin while that one ends."""
    from nibble_kernels.attention_front import attention_front

    case = make_case(64, heads=32, kv_heads=8).on("cuda")
    form = {"positions": case.positions, "cos_sin": case.cos_sin, **case.norms}
    expected, x = [], case.qkv
    for heads, kv_heads in CHAIN:
        x = attention_front(x, heads=heads, kv_heads=kv_heads, **form)
        torch.cuda.synchronize()
        expected.append(x)
    outs = [torch.empty_like(x) for x in expected]

    def chain() -> None:
        x = case.qkv
        for out, (heads, kv_heads) in zip(outs, CHAIN, strict=True):
            x = attention_front(x, heads=heads, kv_heads=kv_heads, out=out, **form)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            chain()
    for _ in range(100):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for out, right in zip(outs, expected, strict=True):
            assert torch.equal(out, right)


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", ["head dim", "type", "scales", "slots"])
def test_what_the_kernel_cannot_compute_is_refused(kernels: ModuleType, wrong: str) -> None:
    case = make_case(2, fp8=wrong == "scales").on("cuda")
    if wrong == "head dim":
        case.qkv = case.qkv[:, : 12 * 96].contiguous()
        expected = "a head dim of 64, 128 or 256, found 96"
    elif wrong == "type":
        case.cache, expected = case.cache.half(), "a cache in bfloat16 or float8_e4m3fn"
    elif wrong == "scales":
        case.scales, expected = {}, "needs scales of keys and values"
    else:
        case.slots, expected = case.slots.int(), "expected int64 slots"
    with pytest.raises(RuntimeError, match=expected):
        front(case)

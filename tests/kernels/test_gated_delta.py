"""nibble::gated_delta_step and gated_delta_prompts: their definition everywhere; on a GPU the
kernels beside it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.kernels.gated_delta_cases import (
    CASES,
    PROMPTS,
    Case,
    check,
    expected,
    make_case,
    make_prompts,
)

STATES = [torch.float32, torch.bfloat16]
# Qwen3.6-35B-A3B's heads, and more tokens than a GPU has multiprocessors.
LARGE: tuple[dict[str, Any], ...] = tuple(
    {
        "tokens": tokens,
        "key_heads": 16,
        "value_heads": 32,
        "columns": 2048,
        "interleaved": tokens > 1,
    }
    for tokens in (1, 5, 64, 200)
)


def run(case: Case, times: int = 1) -> Case:
    """The case after the calls, on its device."""
    from nibble_kernels.gated_delta import gated_delta_prompts, gated_delta_step

    result = case.on(str(case.tensors["x"].device))
    for _ in range(times):
        (gated_delta_prompts if case.is_prompts else gated_delta_step)(**result.arguments())
    return result


def test_a_step_is_one_of_the_rule_in_float64(kernels: ModuleType) -> None:
    """One head, without the convolution's other tokens and with gates of 0."""
    case = make_case(1, 1, 1, 64)
    for name in ("gates", "conv_weight", "dt_bias", "a_log"):
        case.tensors[name].zero_()
    case.tensors["conv_weight"][:, 3] = 1
    state = case.tensors["state"][int(case.tensors["slots"][0]), 0].double()
    rows = case.tensors["qkvz"][0].double().view(4, 128)
    q, k, v = torch.nn.functional.silu(rows[:3]).bfloat16().double()
    q, k = q / (q.square().sum() + 1e-6).sqrt() * 128**-0.5, k / (k.square().sum() + 1e-6).sqrt()
    state = state * 0.5  # exp(-softplus(0))
    state = state + 0.5 * torch.outer(v - state @ k, k)
    y = (state @ q).bfloat16().double()
    y = y / (y.square().mean() + 1e-6).sqrt() * case.tensors["norm"].double()
    y = y * torch.nn.functional.silu(rows[3])
    found = run(case).tensors["out"][0, 0].double()
    assert (found - y).abs().max() <= 2**-8 * y.abs().max()


def test_the_operator_changes_what_its_schema_says(kernels: ModuleType) -> None:
    """Also for torch.compile."""
    from nibble_kernels.gated_delta import _step

    case = make_case(2, 1, 2, 64)
    torch.library.opcheck(
        _step,
        tuple(
            (case.tensors | case.options)[name]
            for name in (
                *("x", "gates", "qkvz", "interleaved", "conv_weight", "conv_state", "state"),
                *("slots", "a_log", "dt_bias", "norm", "epsilon", "sigmoid", "out"),
            )
        ),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("state", STATES, ids=["float32", "bfloat16"])
def test_on_a_gpu_a_step_is_the_definition(kernels: ModuleType, state: torch.dtype) -> None:
    for form in (*CASES, *LARGE):
        case = make_case(**form, state=state)
        check(run(case.on("cuda")), expected(case))


@pytest.mark.gpu
@pytest.mark.parametrize("state", STATES, ids=["float32", "bfloat16"])
def test_on_a_gpu_prompts_are_the_definition(kernels: ModuleType, state: torch.dtype) -> None:
    large = {
        "lengths": (1, 70, 1, 130, 15, 16),
        "key_heads": 16,
        "value_heads": 32,
        "columns": 2048,
    }
    for form in (*PROMPTS, large, large | {"interleaved": True, "padding": 23}):
        case = make_prompts(**form, state=state)
        check(run(case.on("cuda")), expected(case))


@pytest.mark.gpu
@pytest.mark.parametrize("state", STATES, ids=["float32", "bfloat16"])
def test_on_a_gpu_many_steps_stay_with_the_definition(
    kernels: ModuleType, state: torch.dtype
) -> None:
    case = make_case(3, 2, 4, 256, state=state)
    wanted = case
    for _ in range(20):
        wanted = expected(wanted)
    check(run(case.on("cuda"), times=20), wanted)


@pytest.mark.gpu
def test_on_a_gpu_bits_are_equal_in_100_runs_and_beside_other_tokens(kernels: ModuleType) -> None:
    case = make_case(40, 16, 32, 2048).on("cuda")
    first = run(case).tensors
    for _ in range(100):
        again = run(case).tensors
        assert all(again[name].equal(first[name]) for name in ("out", "state", "conv_state"))
    alone = case.on("cuda")
    for name in ("x", "qkvz", "slots", "out"):
        alone.tensors[name] = alone.tensors[name][7:8].contiguous()
    found = run(alone).tensors
    slot = int(alone.tensors["slots"][0])
    assert found["out"][0].equal(first["out"][7])
    assert found["state"][slot].equal(first["state"][slot])


@pytest.mark.gpu
def test_on_a_gpu_a_prompts_bits_do_not_depend_on_the_others(kernels: ModuleType) -> None:
    lengths = (40, 7, 100, 1)
    case = make_prompts(lengths, 4, 8, columns=256).on("cuda")
    together = run(case).tensors
    for _ in range(100):
        again = run(case).tensors
        assert all(again[name].equal(together[name]) for name in ("out", "state", "conv_state"))
    alone = case.on("cuda")
    begin, length = sum(lengths[:2]), lengths[2]
    for name in ("x", "qkvz", "out"):
        alone.tensors[name] = alone.tensors[name][begin : begin + length].contiguous()
    for name in ("slots", "has_state"):
        alone.tensors[name] = alone.tensors[name][2:3]
    alone.tensors["starts"] = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    alone.options["live_tokens"] = length
    found = run(alone).tensors
    slot = int(alone.tensors["slots"][0])
    # torch's product of the gates may add up in another order for another number of rows.
    difference = found["out"].double() - together["out"][begin : begin + length].double()
    assert difference.abs().max() <= 0.02 * together["out"].double().abs().max()
    assert found["conv_state"][slot].equal(together["conv_state"][slot])


@pytest.mark.gpu
def test_on_a_gpu_a_fault_in_another_slot_is_not_seen(kernels: ModuleType) -> None:
    case = make_case(4, 2, 4, 256, padded=2)
    case.tensors["state"][0] = float("nan")
    found = run(case.on("cuda")).tensors
    assert found["out"].isfinite().all()
    assert not found["out"][1].any()


@pytest.mark.gpu
def test_on_a_gpu_a_state_that_the_kernel_cannot_take_is_refused(kernels: ModuleType) -> None:
    case = make_case(1, 1, 1, 64).on("cuda")
    case.tensors["state"] = case.tensors["state"].half()
    with pytest.raises(RuntimeError, match="float32 or bfloat16"):
        run(case)

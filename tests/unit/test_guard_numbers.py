"""A whole number that vLLM's messages cannot hold is refused by the name of its field."""

from __future__ import annotations

from typing import Any

import pytest

from nibble.engine.guard.numbers import number_problem

HUGE = 10**30


@pytest.mark.parametrize(
    "field",
    [
        {"top_k": HUGE},
        {"stream_interval": HUGE},
        {"stream_interval": 1e30},
        {"stream_interval": str(HUGE)},
        {"stream_interval": f" +{HUGE} "},
        {"seed": -(2**63) - 1},
        {"seed": 2**63},
        {"vllm_xargs": {"a": HUGE}},
        {"vllm_xargs": {"a": [1, HUGE]}},
        {"stop_token_ids": [1, HUGE]},
    ],
)
def test_a_number_over_64_bits_is_refused_with_its_fields_name(field: dict[str, Any]) -> None:
    said = number_problem({"messages": [], "max_tokens": 4, **field})
    assert said == f"`{next(iter(field))}` contains a number that does not fit in 64 bits."


@pytest.mark.parametrize(
    "field",
    [
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        {"user": str(HUGE)},
        {"top_k": "12"},
        {"top_k": "0" * 30 + "12"},
        {"temperature": 0.5, "stream": True, "stop": None},
        {"prompt": [HUGE]},
        {"metadata": {"a": [1, {"b": "x"}]}},
    ],
)
def test_other_numbers_pass(field: dict[str, Any]) -> None:
    assert number_problem(field) is None

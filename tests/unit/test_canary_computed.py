"""What the workers say of a computed reference, judged: the limits, and which wrong thing is
named first.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nibble.canary.computed import MEAN_LIMITS, judge_definition, references_from
from nibble.canary.verification import computed_references
from nibble.machine.paths import root
from nibble.plan.choice import Choice
from nibble.reference.store import FORMAT

MEASURED = json.loads((root() / "benchmarks/results/reference_faults_cpu.json").read_text())[
    "models"
]
ABSENT = {  # what a model has no part for
    "nibble-demo-nvfp4": {"MoE routing wrong"},
    "nibble-demo-moe-nvfp4": set(),
    "llama-modelopt": {"MoE routing wrong", "q and k norms swapped in one layer"},
    "qwen3-llmcompressor": {"MoE routing wrong"},
}
HEALTHY: dict[str, Any] = {
    "early": 0.03,
    "late": 0.03,
    "factor": 1.001,
    "norm": 20.0,
    "noise": 0.02,
    "inside": [],
}
POINTS = [
    {"at": name, "early": 0.003, "late": 0.003, "noise": 0.002}
    for name in ("self_attn.o_proj", "mlp.down_proj")
]
LOGITS = {"error": 0.01, "factor": 1.0, "token": 5, "off": 0.05, "spread": 0.01}


def report(layers: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    definition = {
        "tokens": 192,
        "embedding": 0.001,
        "layers": layers or [HEALTHY] * 4,
        "logits": LOGITS,
        "cache": "bf16",
        "norms": {"compared": 17, "wrong": []},
    }
    return {"definition": definition | more}


def test_a_healthy_model_passes_and_says_how_far_its_worst_layer_is() -> None:
    found = judge_definition([report()])
    assert (found.verdict, found.mechanism) == ("passed", "computed")
    assert "4 layers on 192 tokens, at most 0.03 " in found.detail


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"late": 0.5}, "layer 2 is the first wrong one"),
        ({"early": 0.5}, "off by 0.5"),
        ({"early": math.inf, "late": math.inf, "factor": math.nan}, "off by inf"),
        ({"factor": 0.95}, "0.950 times as large"),
        ({"factor": 1.05}, "1.050 times as large"),
        ({"factor": math.nan}, "nan times as large"),
    ],
)
def test_the_first_layer_that_leaves_the_bound_is_named(wrong: dict[str, float], said: str) -> None:
    found = judge_definition([report([HEALTHY, HEALTHY, HEALTHY | wrong, HEALTHY | {"late": 0.9}])])
    assert found.verdict == "failed"
    assert said in found.detail
    assert "layer 2" in found.detail


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"norms": {"compared": 17, "wrong": ["model.layers.1.self_attn.q_norm.weight"]}},
            "q_norm.weight is not what the",
        ),
        ({"embedding": 1.2}, "the embedding is off by 1.2"),
        ({"embedding": math.nan}, "the embedding is off by nan"),
        ({"logits": LOGITS | {"factor": 0.9}}, "the logits are 0.900 times"),
        ({"logits": LOGITS | {"error": 1.4}}, "the logits are off by 1.4"),
        ({"logits": LOGITS | {"off": 3.0, "token": 300}}, "the logit of token 300 is off by +3.00"),
    ],
)
def test_embedding_and_logits(wrong: dict[str, Any], said: str) -> None:
    found = judge_definition([report(**wrong)])
    assert found.verdict == "failed"
    assert said in found.detail


def test_a_layer_that_rounds_much_may_be_off_by_more() -> None:
    rounds = HEALTHY | {"early": 0.12, "late": 0.12, "factor": 0.97}
    assert judge_definition([report([rounds | {"noise": 0.09}] * 4)]).verdict == "passed"
    assert judge_definition([report([rounds | {"noise": 0.01}] * 4)]).verdict == "failed"


def test_one_layer_far_off_is_a_warning_and_all_of_them_are_a_failure() -> None:
    usual, far = HEALTHY | {"early": 0.1, "noise": 0.09}, HEALTHY | {"early": 0.23, "noise": 0.09}
    found = judge_definition([report([usual, usual, far, usual])])
    assert found.verdict == "passed"
    assert (
        found.warning.startswith("layer 2 is farther from the reference")
        and "0.23" in found.warning
    )
    assert judge_definition([report([usual] * 4)]).warning == ""
    found = judge_definition([report([far] * 4)])
    assert found.verdict == "failed"
    assert (
        "all 4 layers are off, on average by 2.3 times what rounding does to them, at most 1.6"
        in found.detail
    )


@pytest.mark.parametrize("place", [0, 1])
def test_what_reaches_a_product_names_the_layer_and_the_product(place: int) -> None:
    points = [dict(one) for one in POINTS]
    points[place]["late"] = 0.05
    found = judge_definition([report([HEALTHY, HEALTHY | {"inside": points}])])
    assert found.verdict == "failed"
    assert (
        f"layer 1 is the first wrong one: what reaches {points[place]['at']} is off by 0.05, at"
        " most 0.026" in found.detail
    )


def test_an_fp8_cache_explains_more_of_what_attention_gives_and_of_nothing_else() -> None:
    attention, mlp = ([HEALTHY | {"inside": [one | {"early": 0.06}]}] for one in POINTS)
    assert judge_definition([report(attention, cache="fp8")]).verdict == "passed"
    assert judge_definition([report(attention, cache="bf16")]).verdict == "failed"
    assert judge_definition([report(mlp, cache="fp8")]).verdict == "failed"


@pytest.mark.parametrize("model", MEASURED)
def test_every_fault_that_was_put_into_a_model_is_caught(model: str) -> None:
    """What was measured with each fault in an engine (benchmarks/reference_faults.py), with the
    limits of today.
    """
    faults = MEASURED[model]["faults"]
    assert {name for name, fault in faults.items() if "not_injected" in fault} == ABSENT[model]
    told = {
        name: judge_definition([{"definition": fault["report"]}]).verdict
        for name, fault in faults.items()
        if name not in ABSENT[model]
    }
    assert told.pop("none") == "passed"
    assert set(told.values()) == {"failed"} and len(told) == 18 - len(ABSENT[model])


def test_flags_that_change_numbers_widen_all_limits() -> None:
    data = {"activations": "fp4", "cases": []}
    assert [
        references_from(data, "", False, differs).limit_factor for differs in (False, True)
    ] == [
        1.0,
        3.0,
    ]
    off = report([HEALTHY | {"early": 0.11}] * 4, logits=LOGITS | {"error": 0.12})
    assert judge_definition([off]).verdict == "failed"
    assert judge_definition([off], 3.0).verdict == "passed"


def test_a_logit_that_is_off_among_others_that_are_is_rounding() -> None:
    assert (
        judge_definition([report(logits=LOGITS | {"off": 1.0, "spread": 0.3})]).verdict == "passed"
    )


def test_workers_that_could_not_compare_say_why() -> None:
    found = judge_definition(
        [{"definition": {"not_compared": "layers of several ranks are not compared"}}]
    )
    assert (found.verdict, found.detail) == (
        "not compared",
        "layers of several ranks are not compared",
    )
    assert judge_definition([{"definition": None}]).verdict == "not compared"


def test_texts_become_tokens_where_the_server_has_another_template() -> None:
    case = {
        "prompt": [{"role": "user", "content": "Hi"}],
        "prompt_ids": [1, 2],
        "answer": "a",
        "answer_ids": [3],
        "logprobs": [-1.0, -2.0],
    }
    data = {"activations": "fp4", "cases": [case]}
    same, tokens = (references_from(data, "here", flag, False).cases[0] for flag in (False, True))
    assert same.prompt == case["prompt"] and tokens.prompt == [1, 2]
    assert references_from(data, "here", False, False).mean_limit == MEAN_LIMITS["fp4"]
    bf16 = data | {"activations": "bf16"}
    assert references_from(bf16, "here", False, False).mean_limit == MEAN_LIMITS["bf16"]
    assert references_from(bf16, "here", False, True).mean_limit > MEAN_LIMITS["bf16"]


@pytest.mark.parametrize(
    ("dated", "flags", "sent"),
    [(False, (), "conversation"), (True, (), "tokens"), (False, ("--chat-template",), "tokens")],
)
def test_a_start_sends_conversations_where_their_tokens_are_the_checkpoints(
    dated: bool, flags: tuple[str, ...], sent: str, tmp_path: Path
) -> None:
    case = {
        "prompt": [{"role": "user", "content": "Hi"}],
        "prompt_ids": [1, 2],
        "answer": "a",
        "answer_ids": [3],
        "logprobs": [-1.0, -2.0],
    }
    file = tmp_path / "reference.json"
    data = {"format": FORMAT, "activations": "fp4", "template_is_dated": dated, "cases": [case]}
    file.write_text(json.dumps(data))
    plan: Any = SimpleNamespace(
        args={flag: Choice("a.jinja", "test") for flag in flags},
        checkpoint=SimpleNamespace(files={}, model_type="qwen3"),
    )
    found = computed_references(plan, {"fp4": file}, ("fp4",))
    assert found is not None
    assert (found.cases[0].prompt == [1, 2]) == (sent == "tokens")
    assert computed_references(plan, {"fp4": file}, ("bf16",)) is None

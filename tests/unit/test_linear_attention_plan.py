"""--linear-attention: what the plan says, and what the plugin is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.linear_attention import FEW_LAUNCHES
from tests.support.models.generated_hybrid import SMALL
from tests.support.models.generated_nvfp4 import write_checkpoint
from tests.support.models.tiny_checkpoint import tensors
from tests.support.models.tiny_checkpoint import write_checkpoint as write_tiny_checkpoint
from tests.support.models.tiny_model import MODELOPT_NVFP4

FLAG = "--additional-config"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-Next."""
    return write_checkpoint(tmp_path_factory.mktemp("qwen3_next") / "m", SMALL, "modelopt")


def planned(model: Path, target: str, *words: str, **environ: str) -> tuple[str, str] | None:
    """The choice with its reason, if the plan has one; what the plugin is told agrees."""
    found = plan_for(read_wishes([str(model), "--target", target, *words], environ))
    config = {name: choice.value for name, choice in found.args.items()}.get(FLAG) or {}
    choice = found.choices.get("linear_attention")
    told = config.get("nibble", {}).get("linear_attention")
    if choice is None:
        assert told is None
        return None
    assert (told or "off") == choice.value
    return choice.value, choice.reason


def test_hopper_has_the_kernels_and_others_where_the_user_asks(model: Path) -> None:
    for words in ((), ("--linear-attention", "auto")):
        assert planned(model, "hopper", *words) == ("on", FEW_LAUNCHES)
    off = ("off", "set by the user")
    assert planned(model, "hopper", NIBBLE_LINEAR_ATTENTION="off") == off
    assert planned(model, "hopper", "--linear-attention", "off") == off
    told = json.dumps({"nibble": {"linear_attention": "off"}})
    assert planned(model, "hopper", FLAG, told) == off


@pytest.mark.parametrize("target", ["gb10", "sm120", "b200"])
def test_other_targets_have_the_kernels_where_the_user_asks(model: Path, target: str) -> None:
    value, reason = planned(model, target) or ("", "")
    assert value == "off" and reason.endswith("the default only on hopper")
    assert planned(model, target, "--linear-attention", "on") == ("on", "set by the user")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'),
            "drafts take vLLM's kernels",
        ),
        (("--enable-lora",), "adapters may change"),
    ],
)
def test_flags_that_rule_the_kernels_out_are_named(
    model: Path, words: tuple[str, ...], why: str
) -> None:
    value, reason = planned(model, "hopper", *words) or ("", "")
    assert value == "off" and why in reason


def test_a_model_without_a_gated_delta_rule_has_no_choice(tmp_path: Path) -> None:
    dense = write_tiny_checkpoint(
        tmp_path / "dense", tensors("nvfp4"), {"quantization_config": MODELOPT_NVFP4}
    )
    assert planned(dense, "hopper") is None


def test_a_cpu_has_no_choice(model: Path) -> None:
    assert planned(model, "cpu") is None


def test_results_that_must_not_depend_on_the_batch_keep_vllms_kernels(model: Path) -> None:
    """nibble's take prompts of short steps alone."""
    value, reason = planned(model, "hopper", VLLM_BATCH_INVARIANT="1") or ("", "")
    assert value == "off" and "VLLM_BATCH_INVARIANT" in reason

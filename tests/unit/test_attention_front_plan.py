"""--attention-front: what the plan says, and what the plugin is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nibble.plan.attention_front import ONE_LAUNCH
from nibble.plan.gather import plan_for, read_wishes
from tests.support.models.tiny_checkpoint import tensors, write_checkpoint
from tests.support.models.tiny_model import MODELOPT_NVFP4

FLAG = "--additional-config"


def model(folder: Path, **config: Any) -> Path:
    return write_checkpoint(
        folder, tensors("nvfp4"), {"quantization_config": MODELOPT_NVFP4, **config}
    )


def planned(model: Path, target: str, *words: str, **environ: str) -> tuple[str, str]:
    """The choice with its reason; what the plugin is told agrees."""
    found = plan_for(read_wishes([str(model), "--target", target, *words], environ))
    config = {name: choice.value for name, choice in found.args.items()}.get(FLAG) or {}
    choice = found.choices.get("attention_front")
    told = config.get("nibble", {}).get("attention_front", "off")
    assert told == (choice.value if choice else "off")
    return told, choice.reason if choice else ""


def test_hopper_has_the_kernel_and_others_where_the_user_asks(tmp_path: Path) -> None:
    found = model(tmp_path / "m")
    for words in ((), ("--attention-front", "auto")):
        assert planned(found, "hopper", *words) == ("on", ONE_LAUNCH)
    assert planned(found, "hopper", NIBBLE_ATTENTION_FRONT="off") == ("off", "set by the user")
    assert planned(found, "cpu") == ("off", "")
    for target in ("gb10", "sm120", "b200"):
        assert planned(found, target)[1].endswith("the default only on hopper")
        assert planned(found, target, "--attention-front", "on") == ("on", "set by the user")
    told = json.dumps({"nibble": {"attention_front": "off"}})
    assert planned(found, "hopper", FLAG, told) == ("off", "set by the user")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--attention-backend", "FLASHINFER"), "flashinfer is not FlashAttention"),
        (("--decode-context-parallel-size", "2"), "split over ranks"),
    ],
)
def test_flags_that_rule_the_kernel_out_are_named(
    tmp_path: Path, words: tuple[str, ...], why: str
) -> None:
    told, reason = planned(model(tmp_path / "m"), "hopper", *words)
    assert told == "off" and why in reason


def test_a_model_that_the_kernel_does_not_know_keeps_vllms_code(tmp_path: Path) -> None:
    found = model(tmp_path / "m", architectures=["Gemma3ForCausalLM"], model_type="gemma3_text")
    told, reason = planned(found, "hopper")
    assert told == "off" and "does not know Gemma3ForCausalLM" in reason

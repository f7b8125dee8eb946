"""--shared-expert: what the plan says, and what the plugin is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.shared_expert import ONE_LAUNCH
from tests.support.models.generated_hybrid import HybridShape
from tests.support.models.generated_nvfp4 import Shape, write_checkpoint

FLAG = "--additional-config"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts and a shared one in each layer."""
    shape = HybridShape(layers=4, hidden=64, intermediate=32, experts=4, chosen=2)
    return write_checkpoint(tmp_path_factory.mktemp("shared") / "model", shape, "modelopt")


def planned(model: Path, target: str, *words: str, **environ: str) -> tuple[str, str] | None:
    """The choice with its reason, if the plan has one; what the plugin is told agrees."""
    found = plan_for(read_wishes([str(model), "--target", target, *words], environ))
    config = {name: choice.value for name, choice in found.args.items()}.get(FLAG) or {}
    choice = found.choices.get("shared_expert")
    told = config.get("nibble", {}).get("shared_expert")
    if choice is None:
        assert told is None
        return None
    assert (told or "off") == choice.value
    return choice.value, choice.reason


def test_hoppers_default_is_the_launch_of_the_routed_experts(model: Path) -> None:
    for words in ((), ("--shared-expert", "auto")):
        assert planned(model, "hopper", *words) == ("on", ONE_LAUNCH)
    for value in ("on", "off"):
        expected = (value, "set by the user")
        assert planned(model, "hopper", "--shared-expert", value) == expected
        assert planned(model, "hopper", NIBBLE_SHARED_EXPERT=value) == expected


def test_other_gpus_keep_vllms_shared_expert(model: Path) -> None:
    ours = ("--moe-kernel", "nibble")
    assert planned(model, "sm120", *ours) == ("off", "it is the default only on hopper")


def test_vllms_experts_and_models_without_a_shared_one_have_no_choice(
    model: Path, tmp_path: Path
) -> None:
    assert planned(model, "hopper", "--moe-kernel", "vllm") is None
    assert planned(model, "cpu") is None
    plain = write_checkpoint(tmp_path / "plain", Shape(experts=4, chosen=2), "modelopt")
    assert planned(plain, "hopper") is None

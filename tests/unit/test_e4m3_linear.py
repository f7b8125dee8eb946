"""The kernel of FP8 linear layers beside NVFP4 weights: whose it is in a plan, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_linear_kernel import plan

from nibble.engine.contract import Options
from nibble.plan.e4m3_linear import BF16_ACTIVATIONS
from nibble.plan.plan import Plan
from tests.support.models.tiny_checkpoint import LINEAR_SHAPES, linear, tensors, write_checkpoint

FLAG = "--additional-config"
OF_FP8 = "self_attn"


def mixed_config() -> dict[str, Any]:
    def entry(name: str) -> dict[str, Any]:
        if OF_FP8 in name:
            return {"quant_algo": "FP8"}
        return {"quant_algo": "W4A16_NVFP4", "group_size": 16}

    layers = {f"model.layers.0.{name}": entry(name) for name in LINEAR_SHAPES}
    return {
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": layers,
        }
    }


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Attention in FP8, the MLP in NVFP4."""
    weights = tensors("w4a16")
    for name, (rows, columns) in LINEAR_SHAPES.items():
        if OF_FP8 in name:
            stem = f"model.layers.0.{name}."
            weights = {key: value for key, value in weights.items() if not key.startswith(stem)}
            weights |= linear(stem[:-1], rows, columns, "fp8")
    return write_checkpoint(tmp_path / "mixed", weights, mixed_config())


def reason(found: Plan, kernel: str) -> str:
    """Why it is that kernel, of a plan that tells vLLM so."""
    told = found.args[FLAG].value.get("nibble", {}) if FLAG in found.args else {}
    assert told.get("e4m3_linear", "vllm") == found.choices["e4m3_linear"].value == kernel
    assert Options.from_config({"nibble": told}).e4m3_linear == kernel
    return found.choices["e4m3_linear"].reason


def test_hopper_takes_nibbles_kernel_for_few_rows(mixed: Path) -> None:
    assert reason(plan(mixed), "nibble") == BF16_ACTIVATIONS


@pytest.mark.parametrize("target", ["gb10", "sm120", "b200"])
def test_elsewhere_vllms_kernel_multiplies_alone(mixed: Path, target: str) -> None:
    assert "is made for hopper" in reason(plan(mixed, target=target), "vllm")


def test_the_linear_kernel_that_the_user_names_is_that_of_fp8_layers_too(mixed: Path) -> None:
    assert reason(plan(mixed, "--linear-kernel", "vllm"), "vllm") == "set by the user"
    named = plan(mixed, target="sm120", NIBBLE_LINEAR_KERNEL="nibble")
    assert reason(named, "nibble") == "set by the user"
    told = plan(mixed, FLAG, '{"nibble": {"e4m3_linear": "vllm"}}')
    assert reason(told, "vllm") == "set by the user"
    assert told.choices["linear_kernel"].value == "nibble"


@pytest.mark.parametrize(
    ("words", "environ", "why"),
    [
        ((), {"VLLM_EXTRA_ARGS": "--linear-backend marlin"}, "marlin names another kernel"),
        ((), {"VLLM_BATCH_INVARIANT": "1"}, "depends on the number of rows"),
        (("--enable-lora",), {}, "layers with adapters keep vLLM's kernel"),
        (("--dtype", "float16"), {}, "needs BF16 activations"),
    ],
    ids=str,
)
def test_what_nibbles_kernel_does_not_do_is_vllms(
    mixed: Path, words: tuple[str, ...], environ: dict[str, str], why: str
) -> None:
    assert why in reason(plan(mixed, *words, **environ), "vllm")


def test_checkpoints_without_such_layers_have_no_choice(mixed: Path, tmp_path: Path) -> None:
    for form, config in (("w4a16", "W4A16_NVFP4"), ("fp8", "FP8")):
        quantization = {"quant_method": "modelopt", "quant_algo": config, "ignore": ["lm_head"]}
        folder = write_checkpoint(
            tmp_path / form, tensors(form), {"quantization_config": quantization}
        )
        assert "e4m3_linear" not in plan(folder).choices
    assert "e4m3_linear" not in plan(mixed, target="cpu").choices


def test_another_value_is_refused() -> None:
    with pytest.raises(ValueError, match=r"e4m3_linear is '8x16'"):
        Options.from_config({"nibble": {"e4m3_linear": "8x16"}})

"""NIBBLE_NVFP4_ACTIVATIONS and NIBBLE_QUANTIZE_LM_HEAD: what reaches vLLM's --additional-config,
and what is refused.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from nibble.canary.kernels import expectations
from nibble.engine import installed as installed_module
from nibble.errors import ExitCode, NibbleError
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.plan import Plan
from nibble.serve.preflight.nvfp4 import check_nvfp4, check_plugin
from tests.support.models.tiny_checkpoint import OTHER_FAMILY, linear, tensors, write_checkpoint
from tests.support.models.tiny_model import MODELOPT_NVFP4
from tests.support.refusals import refusal_of

FLAG = "--additional-config"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(
        tmp_path / "m", tensors("nvfp4"), {"quantization_config": MODELOPT_NVFP4}
    )


def plan(folder: Path, *words: str, target: str = "gb10", **environ: str) -> Plan:
    return plan_for(read_wishes([str(folder), "--target", target, *words], environ))


def refused(folder: Path, *words: str) -> NibbleError:
    return refusal_of(lambda: plan(folder, *words), ExitCode.CONFIG)


def test_defaults_are_not_written(model: Path) -> None:
    assert FLAG not in plan(model).args
    assert (
        FLAG
        not in plan(model, "--nvfp4-activations", "checkpoint", "--quantize-lm-head", "off").args
    )


def test_options_become_one_key_of_vllms_additional_config(model: Path) -> None:
    found = plan(model, "--quantize-lm-head", "nvfp4", NIBBLE_NVFP4_ACTIVATIONS="bf16")
    both = {"nibble": {"nvfp4_activations": "bf16", "quantize_lm_head": "nvfp4"}}
    assert found.args[FLAG].value == both
    assert "environment NIBBLE_NVFP4_ACTIVATIONS" in found.args[FLAG].source
    assert "command line --quantize-lm-head" in found.args[FLAG].source
    words = found.argv()
    assert json.loads(words[words.index(FLAG) + 1]) == both


@pytest.mark.parametrize("value", ["[1]", '"x"', "1"])
@pytest.mark.parametrize("target", ["gb10", "hopper"])
def test_an_additional_config_that_is_no_object_is_refused(
    model: Path, value: str, target: str
) -> None:
    error = refused(model, FLAG, value, "--target", target, "--max-num-seqs", "4")
    assert error.what.startswith(f"{FLAG} is ") and error.expected == "a JSON object"


def test_a_users_additional_config_is_joined_key_by_key(model: Path) -> None:
    own = {"other": 1, "nibble": {"nvfp4_activations": "checkpoint"}}
    found = plan(
        model, "--quantize-lm-head", "nvfp4", FLAG, json.dumps(own), NIBBLE_NVFP4_ACTIVATIONS="bf16"
    )
    expected = {
        "other": 1,
        "nibble": {"nvfp4_activations": "checkpoint", "quantize_lm_head": "nvfp4"},
    }
    assert found.args[FLAG].value == expected


def test_bf16_activations_are_those_the_known_risks_are_held_against(tmp_path: Path) -> None:
    # The rule sm120-unaligned-k is about W4A4 kernels; served weight-only it has nothing to say.
    weights = tensors("nvfp4") | linear("model.layers.0.mlp.down_proj", 64, 48, "nvfp4")
    folder = write_checkpoint(
        tmp_path / "m", weights, {"quantization_config": MODELOPT_NVFP4} | OTHER_FAMILY
    )
    assert plan(folder, target="sm120").rules.count("sm120-unaligned-k") == 1
    served = plan(folder, "--nvfp4-activations", "bf16", target="sm120")
    assert "sm120-unaligned-k" not in served.rules
    assert served.checkpoint is not None and served.checkpoint.scheme.activations == "bf16"


def test_bf16_activations_for_a_model_that_is_not_nvfp4_are_refused(tmp_path: Path) -> None:
    error = refused(
        write_checkpoint(tmp_path / "m", tensors("bf16")), "--nvfp4-activations", "bf16"
    )
    assert "needs an NVFP4 checkpoint" in error.what and "is bf16" in error.what


def test_nibbles_linear_kernel_is_asked_for_by_name(model: Path) -> None:
    found = plan(model, NIBBLE_LINEAR_KERNEL="nibble", target="hopper")
    assert found.args[FLAG].value["nibble"]["linear_kernel"] == "nibble"
    theirs = plan(model, "--linear-kernel", "vllm", target="hopper").args[FLAG].value
    assert "linear_kernel" not in theirs["nibble"]


def test_nibbles_linear_kernel_is_refused_where_it_cannot_be_what_runs(
    model: Path, tmp_path: Path
) -> None:
    wanted = ("--linear-kernel", "nibble")
    assert (
        "on the CPU nibble's kernel runs without it"
        in refused(model, *wanted, "--target", "cpu").what
    )
    two = refused(model, *wanted, "--target", "hopper", "--linear-backend", "marlin")
    assert "--linear-backend marlin (command line) name two kernels" in two.what
    # On another GPU that multiplies FP4 it would change a W4A4 checkpoint's arithmetic.
    fp4 = refused(model, *wanted, "--target", "b200")
    assert "has them in FP4 on b200" in fp4.what and "NIBBLE_NVFP4_ACTIVATIONS=bf16" in fp4.action
    assert plan(model, *wanted, "--nvfp4-activations", "bf16", target="b200").args[FLAG]
    plain = refused(
        write_checkpoint(tmp_path / "b", tensors("bf16")), *wanted, "--target", "hopper"
    )
    assert "needs an NVFP4 checkpoint" in plain.what


def test_w4a4_with_nibbles_linear_kernel_is_for_columns_that_it_takes(tmp_path: Path) -> None:
    """Of a layer's part on each GPU: 96 columns on one GPU, 48 on two."""
    weights = tensors("nvfp4") | linear("model.layers.0.mlp.down_proj", 64, 96, "nvfp4")
    config = {"quantization_config": MODELOPT_NVFP4} | OTHER_FAMILY
    folder = write_checkpoint(tmp_path / "m", weights, config)
    wanted = ("--linear-kernel", "nibble")
    found = plan(folder, *wanted, target="gb10")
    assert found.args[FLAG].value["nibble"]["linear_kernel"] == "nibble"
    two = ("--tensor-parallel-size", "2", "--num-gpus", "2")
    error = refused(folder, *wanted, *two, "--target", "gb10")
    assert "a layer of 64x48 on a GPU has columns that are not a multiple of 32" in error.what
    assert "NIBBLE_NVFP4_ACTIVATIONS=bf16" in error.action
    plan(folder, *wanted, *two, "--nvfp4-activations", "bf16", target="gb10")


@pytest.mark.parametrize("target", ["gb10", "sm120"])
def test_w4a4_with_nibbles_kernels_is_served_by_those_with_fp4_products(
    model: Path, target: str
) -> None:
    found = plan(model, "--linear-kernel", "nibble", target=target)
    (want,) = (want for want in expectations(found, {}) if want.part == "linear")
    assert want.allowed == ("NibbleNvFp4W4A4LinearKernel", "NibbleNvFp4LinearKernel")
    words = ("--linear-kernel", "nibble", "--nvfp4-activations", "bf16")
    for other in (plan(model, *words, target=target), plan(model, *words, target="hopper")):
        (want,) = (want for want in expectations(other, {}) if want.part == "linear")
        assert want.allowed == ("NibbleNvFp4LinearKernel",)


def test_sparse_weights_leave_activations_in_bf16(model: Path) -> None:
    words = ("--sparse-fp4", "on", "--linear-kernel", "nibble")
    error = refused(model, *words, "--target", "gb10")
    assert "NIBBLE_SPARSE_FP4=on leaves activations in BF16" in error.what
    plan(model, *words, "--nvfp4-activations", "bf16", target="gb10")


def test_sparse_weights_need_nibbles_linear_kernel(model: Path) -> None:
    asked = plan(model, NIBBLE_SPARSE_FP4="on", target="hopper").args[FLAG].value["nibble"]
    assert asked["sparse_fp4"] == "on" and asked["linear_kernel"] == "nibble"  # hopper's auto
    for target in ("gb10", "cpu"):
        error = refused(model, "--sparse-fp4", "on", "--target", target)
        assert "NIBBLE_SPARSE_FP4=on needs nibble's linear kernel" in error.what


def test_nibbles_experts_are_asked_for_by_name_and_refused_where_there_are_none(
    model: Path, tmp_path: Path
) -> None:
    dense = refused(model, "--moe-kernel", "nibble", "--target", "hopper")
    assert "needs experts" in dense.what and "NIBBLE_MOE_KERNEL" in dense.action
    config = {"quantization_config": MODELOPT_NVFP4, "num_experts": 4, "num_experts_per_tok": 2}
    experts = write_checkpoint(tmp_path / "e", tensors("nvfp4"), config)
    found = plan(experts, NIBBLE_MOE_KERNEL="nibble", target="hopper")
    assert found.args[FLAG].value["nibble"]["moe_kernel"] == "nibble"
    two = refused(
        experts, "--moe-kernel", "nibble", "--target", "hopper", "--moe-backend", "marlin"
    )
    assert "--moe-backend marlin (command line) name two kernels" in two.what


def test_a_weight_only_checkpoint_has_bf16_activations_anyway(tmp_path: Path) -> None:
    declared = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": ["lm_head"]}
    folder = write_checkpoint(tmp_path / "m", tensors("w4a16"), {"quantization_config": declared})
    assert plan(folder, "--nvfp4-activations", "bf16").args[FLAG].value["nibble"] == {
        "nvfp4_activations": "bf16"
    }


HEADS: dict[str, tuple[dict[str, Any], str, str]] = {
    "tied": ({"tie_word_embeddings": True}, "bf16", "it is the embedding (tie_word_embeddings)"),
    "tied in the text config": (
        {"text_config": {"tie_word_embeddings": True, "hidden_size": 64}},
        "bf16",
        "it is the embedding",
    ),
    "quantized": (
        {"quantization_config": MODELOPT_NVFP4 | {"ignore": []}},
        "nvfp4",
        "it is quantized already (U8)",
    ),
    "quantized to fp8": ({}, "fp8", "it is quantized already (F8_E4M3)"),
    "odd size": (
        {"hidden_size": 72} | OTHER_FAMILY,
        "bf16",
        "its hidden size 72 is not a multiple of 16",
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_an_output_head_that_cannot_be_quantized_is_refused(name: str, tmp_path: Path) -> None:
    config, form, message = HEADS[name]
    weights = {n: t for n, t in tensors("bf16").items() if not n.startswith("lm_head.")}
    weights |= linear("lm_head", 128, 64, form)
    error = refused(
        write_checkpoint(tmp_path / "m", weights, config), "--quantize-lm-head", "nvfp4"
    )
    assert message in error.what and "NIBBLE_QUANTIZE_LM_HEAD" in error.line()


def test_a_model_without_an_output_head_is_refused(tmp_path: Path) -> None:
    weights = {
        name: tensor for name, tensor in tensors("bf16").items() if not name.startswith("lm_head.")
    }
    error = refused(write_checkpoint(tmp_path / "m", weights), "--quantize-lm-head", "nvfp4")
    assert "the checkpoint has no separate one" in error.what


def test_a_plain_output_head_of_a_plain_model_may_be_quantized(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", tensors("bf16"))
    assert plan(folder, "--quantize-lm-head", "nvfp4").args[FLAG].value["nibble"] == {
        "quantize_lm_head": "nvfp4"
    }


# --- the plugin -----------------------------------------------------------------------------------


def with_plugin(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    point = importlib.metadata.EntryPoint(
        "nibble", "nibble.engine.plugin:register", "vllm.general_plugins"
    )
    monkeypatch.setattr(installed_module, "entry_points", lambda **_: [point] if installed else [])


def test_without_the_plugin_nvfp4_is_refused_on_the_cpu_and_warned_of_on_a_gpu(
    model: Path, monkeypatch
) -> None:
    with_plugin(monkeypatch, False)
    with pytest.raises(NibbleError) as caught:
        check_plugin(plan(model, target="cpu"), {})
    assert caught.value.code == ExitCode.CONFIG and "nibble-kernels" in caught.value.line()
    assert ["warning: " in line for line in check_plugin(plan(model), {})] == [True]
    with pytest.raises(NibbleError, match="quantize_lm_head"):
        check_plugin(plan(model, "--quantize-lm-head", "nvfp4"), {})


def test_the_plugin_without_its_operators_counts_as_none(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_plugin(monkeypatch, True)
    monkeypatch.setattr(installed_module, "find_spec", lambda name: None)
    with pytest.raises(NibbleError, match=r"nibble-kernels, .* is not installed"):
        check_plugin(plan(model, target="cpu"), {})


def test_a_plain_model_needs_the_plugin_only_for_an_option(tmp_path: Path, monkeypatch) -> None:
    with_plugin(monkeypatch, False)
    folder = write_checkpoint(tmp_path / "m", tensors("bf16"))
    assert check_nvfp4(plan(folder), {}) == []
    with pytest.raises(NibbleError, match="quantize_lm_head"):
        check_nvfp4(plan(folder, "--quantize-lm-head", "nvfp4"), {})


def test_vllm_plugins_that_leave_nibble_out_count_as_no_plugin(model: Path, monkeypatch) -> None:
    with_plugin(monkeypatch, True)
    assert check_plugin(plan(model, target="cpu"), {}) == []
    assert check_plugin(plan(model, target="cpu"), {"VLLM_PLUGINS": "other,nibble"}) == []
    with pytest.raises(NibbleError, match="VLLM_PLUGINS"):
        check_plugin(plan(model, target="cpu"), {"VLLM_PLUGINS": "other"})

"""The quantization config vLLM is given: legacy files, weight-only exports with the wrong label,
maps of mixed layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from test_checkpoint_scheme import compressed, group, hf_quant

from nibble.checkpoint.exclusions import MAX_OVERRIDE_BYTES
from nibble.checkpoint.vllm_config import one_expert_a_layer
from nibble.errors import ExitCode, NibbleError
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.plan import Plan
from tests.support.models.tiny_checkpoint import (
    LINEAR_SHAPES,
    Tensors,
    linear,
    tensors,
    write_checkpoint,
)
from tests.support.models.tiny_model import MODELOPT_NVFP4
from tests.support.refusals import refusal_of

LAYER = "model.layers.0."
MAP = {LAYER + name: {"quant_algo": "NVFP4", "group_size": 16} for name in LINEAR_SHAPES}
INPUTS = {
    "num_bits": 4,
    "type": "float",
    "group_size": 16,
    "strategy": "tensor_group",
    "dynamic": "local",
}


def plan(folder: Path, *words: str, target: str = "gb10") -> Plan:
    return plan_for(read_wishes([str(folder), "--target", target, *words], {}))


def planned(
    folder: Path, weights: Tensors, declared: Any = None, legacy: Any = None, **config: Any
) -> Plan:
    given = config | ({"quantization_config": declared} if declared else {})
    return plan(write_checkpoint(folder, weights, given, legacy))


def override(found: Plan) -> Mapping[str, Any] | None:
    choice = found.args.get("--hf-overrides")
    return choice and choice.value["quantization_config"]


def mixed(layers: Any, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
        **more,
    }


def refused(
    folder: Path, weights: Tensors, declared: Any = None, legacy: Any = None
) -> NibbleError:
    return refusal_of(lambda: planned(folder, weights, declared, legacy))


# --- hf_quant_config.json alone -------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["NVFP4", "FP8"])
def test_a_legacy_file_that_vllm_reads_is_left_alone(algorithm: str, tmp_path: Path) -> None:
    form = {"NVFP4": "nvfp4", "FP8": "fp8"}[algorithm]
    assert override(planned(tmp_path / "m", tensors(form), legacy=hf_quant(algorithm))) is None


def test_a_legacy_w4a16_file_becomes_a_config_in_the_newer_form(tmp_path: Path) -> None:
    legacy = hf_quant("W4A16_NVFP4", kv_cache_quant_algo="FP8")
    found = planned(tmp_path / "m", tensors("w4a16"), legacy=legacy)
    assert override(found) == {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        "ignore": ["lm_head"],
        "group_size": 16,
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    }
    assert "hf_quant_config.json" in found.args["--hf-overrides"].reason


def test_a_legacy_mixed_file_keeps_its_map(tmp_path: Path) -> None:
    legacy = hf_quant("MIXED_PRECISION", quantized_layers=MAP, exclude_modules=None)
    config = override(planned(tmp_path / "m", tensors("nvfp4"), legacy=legacy))
    assert config is not None and config["quantized_layers"] == MAP
    assert (config["quant_algo"], config["ignore"]) == ("MIXED_PRECISION", [])


def test_a_legacy_file_of_another_producer_or_without_keys_is_put_right(tmp_path: Path) -> None:
    # vLLM 0.32 takes the first for no quantization at all and raises ValueError for the second.
    other = hf_quant("NVFP4", "somebody")
    bare = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
    }
    for name, legacy in (("other", other), ("bare", bare)):
        config = override(planned(tmp_path / name, tensors("nvfp4"), legacy=legacy))
        assert config is not None and (config["quant_method"], config["quant_algo"]) == (
            "modelopt",
            "NVFP4",
        )


def test_a_legacy_file_with_null_exclusions_is_read_as_an_empty_list(tmp_path: Path) -> None:
    weights = {
        name: tensor for name, tensor in tensors("w4a16").items() if name != "lm_head.weight"
    }
    legacy = hf_quant("W4A16_NVFP4", exclude_modules=None)
    config = override(planned(tmp_path / "m", weights, legacy=legacy))
    assert config is not None and config["ignore"] == [
        "lm_head"
    ]  # by its tensors: it is the embedding


@pytest.mark.parametrize("key", ["exclude_modules", "ignore"])
def test_null_exclusions_in_config_json_are_an_empty_list_that_the_tensors_correct(
    key: str, tmp_path: Path
) -> None:
    declared = {name: value for name, value in MODELOPT_NVFP4.items() if name != "ignore"} | {
        key: None
    }
    config = override(planned(tmp_path / "m", tensors("nvfp4"), declared))
    assert config is not None and config["ignore"] == ["lm_head"]


def test_an_output_head_that_is_the_embedding_is_listed_as_unquantized(tmp_path: Path) -> None:
    # Else vLLM builds it in NVFP4 and finds no scales for it.
    tied = {name: tensor for name, tensor in tensors("nvfp4").items() if name != "lm_head.weight"}
    config = override(
        planned(tmp_path / "m", tied, MODELOPT_NVFP4 | {"ignore": []}, tie_word_embeddings=True)
    )
    assert config is not None and config["ignore"] == ["lm_head"]
    assert override(planned(tmp_path / "listed", tied, MODELOPT_NVFP4)) is None


def test_an_unknown_algorithm_is_refused_by_name(tmp_path: Path) -> None:
    for name, arguments in (
        ("legacy", {"legacy": hf_quant("NVFP4_AWQ")}),
        ("new", {"declared": MODELOPT_NVFP4 | {"quant_algo": "NVFP4_AWQ"}}),
    ):
        error = refused(tmp_path / name, tensors("nvfp4"), **arguments)
        assert error.code == ExitCode.CONFIG and "NVFP4_AWQ" in error.line()


# --- weight-only exports labelled W4A4 ------------------------------------------------------------


def test_a_modelopt_export_without_any_activation_scale_is_served_weight_only(
    tmp_path: Path,
) -> None:
    found = planned(tmp_path / "m", tensors("w4a16"), MODELOPT_NVFP4)
    assert override(found) == MODELOPT_NVFP4 | {"quant_algo": "W4A16_NVFP4"}
    assert found.checkpoint is not None and found.checkpoint.scheme.activations == "bf16"
    assert any("served weight-only" in notice for notice in found.notices)


def test_a_legacy_export_without_any_activation_scale_is_served_weight_only(tmp_path: Path) -> None:
    config = override(planned(tmp_path / "m", tensors("w4a16"), legacy=hf_quant("NVFP4")))
    assert (
        config is not None
        and config["quant_algo"] == "W4A16_NVFP4"
        and "quantization" not in config
    )


def test_a_compressed_export_without_any_activation_scale_is_served_weight_only(
    tmp_path: Path,
) -> None:
    config = override(
        planned(tmp_path / "m", tensors("ct"), compressed(group(INPUTS), ignore=["lm_head"]))
    )
    assert config is not None and config["config_groups"]["group_0"]["input_activations"] is None
    assert config["config_groups"]["group_0"]["weights"]["num_bits"] == 4


def test_a_mixed_export_without_any_activation_scale_is_served_weight_only(tmp_path: Path) -> None:
    config = override(planned(tmp_path / "m", tensors("w4a16"), mixed(MAP)))
    assert config is not None
    assert {entry["quant_algo"] for entry in config["quantized_layers"].values()} == {"W4A16_NVFP4"}


def test_the_label_and_the_list_are_corrected_together(tmp_path: Path) -> None:
    found = planned(tmp_path / "m", tensors("w4a16"), MODELOPT_NVFP4 | {"ignore": []})
    config = override(found)
    assert config is not None and (config["quant_algo"], config["ignore"]) == (
        "W4A16_NVFP4",
        ["lm_head"],
    )
    reason = found.args["--hf-overrides"].reason
    assert "no activation scales" in reason and "wrong about lm_head" in reason


def test_a_mixed_layer_without_activation_scale_beside_others_with_one_is_refused(
    tmp_path: Path,
) -> None:
    weights = tensors("nvfp4")
    del weights[LAYER + "mlp.up_proj.input_scale"]
    assert LAYER + "mlp.up_proj.input_scale" in refused(tmp_path / "m", weights, mixed(MAP)).line()


def test_a_mixed_layer_that_the_map_names_weight_only_needs_no_activation_scale(
    tmp_path: Path,
) -> None:
    weights = tensors("nvfp4")
    del weights[LAYER + "mlp.down_proj.input_scale"]
    labelled = MAP | {LAYER + "mlp.down_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16}}
    assert override(planned(tmp_path / "w4a16", weights, mixed(labelled))) is None


# --- the map of mixed layers ----------------------------------------------------------------------


def test_a_map_that_agrees_with_the_tensors_is_left_alone(tmp_path: Path) -> None:
    assert override(planned(tmp_path / "m", tensors("nvfp4"), mixed(MAP))) is None


def test_a_quantized_layer_that_the_map_misses_is_added_as_it_is_stored(tmp_path: Path) -> None:
    weights = tensors("nvfp4") | linear(LAYER + "mlp.down_proj", 64, 128, "fp8")
    del weights[LAYER + "mlp.down_proj.weight_scale"]
    weights[LAYER + "mlp.down_proj.weight_scale"] = ("F32", [])
    weights = {
        name: t for name, t in weights.items() if name != LAYER + "mlp.down_proj.weight_scale_2"
    }
    short = {
        name: entry for name, entry in MAP.items() if not name.endswith(("down_proj", "q_proj"))
    }
    config = override(planned(tmp_path / "m", weights, mixed(short)))
    assert config is not None
    assert config["quantized_layers"] == short | {
        LAYER + "mlp.down_proj": {"quant_algo": "FP8"},
        LAYER + "self_attn.q_proj": {"quant_algo": "NVFP4", "group_size": 16},
    }


def test_a_plain_layer_that_the_map_names_is_taken_out(tmp_path: Path) -> None:
    found = planned(
        tmp_path / "m", tensors("nvfp4"), mixed(MAP | {"lm_head": {"quant_algo": "NVFP4"}})
    )
    config = override(found)
    assert config is not None and config["quantized_layers"] == MAP
    assert "wrong about lm_head" in found.args["--hf-overrides"].reason


def test_a_map_of_one_expert_stands_for_its_layer(tmp_path: Path) -> None:
    experts = [
        f"{LAYER}mlp.experts.{number}.{name}"
        for number in range(3)
        for name in ("gate_proj", "up_proj")
    ]
    weights = tensors("nvfp4")
    for name in experts:
        weights |= linear(name, 64, 64, "nvfp4")
    one = MAP | {experts[0]: {"quant_algo": "NVFP4"}}
    assert override(planned(tmp_path / "one", weights, mixed(one))) is None
    config = override(planned(tmp_path / "none", weights, mixed(MAP)))
    assert config is not None and f"{LAYER}mlp.experts" in config["quantized_layers"]


def test_a_map_of_every_expert_is_shortened_where_they_are_alike() -> None:
    names = [f"model.layers.{n}.mlp.experts.{e}.up_proj" for n in range(2) for e in range(4)]
    layers = {name: {"quant_algo": "NVFP4"} for name in names}
    assert list(one_expert_a_layer(layers)) == [names[0], names[4]]
    different = layers | {names[1]: {"quant_algo": "FP8"}}
    assert list(one_expert_a_layer(different)) == names[:5]


def test_a_map_that_is_nowhere_is_taken_from_the_tensors(tmp_path: Path) -> None:
    config = override(planned(tmp_path / "m", tensors("nvfp4"), mixed({})))
    assert config is not None and config["quantized_layers"] == MAP
    error = refused(tmp_path / "unknown", tensors("awq"), mixed({}))
    assert error.code == ExitCode.CONFIG and "without a quantized layer" in error.line()


def test_a_map_in_hf_quant_config_beside_config_json_counts(tmp_path: Path) -> None:
    declared = {name: value for name, value in mixed(MAP).items() if name != "quantized_layers"}
    legacy = hf_quant("MIXED_PRECISION", quantized_layers=MAP)
    assert override(planned(tmp_path / "m", tensors("nvfp4"), declared, legacy)) is None


def test_a_config_too_long_for_a_command_is_refused_by_name(tmp_path: Path) -> None:
    long = {f"model.layers.{number}.{'x' * 90}": {"quant_algo": "NVFP4"} for number in range(1500)}
    legacy = hf_quant("MIXED_PRECISION", quantized_layers=MAP | long)
    error = refused(tmp_path / "m", tensors("nvfp4"), legacy=legacy)
    assert error.code == ExitCode.CONFIG and str(MAX_OVERRIDE_BYTES) in error.line()


# --- targets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "declared"),
    [("nvfp4", MODELOPT_NVFP4), ("ct_w4a4", compressed(group(INPUTS))), ("nvfp4", mixed(MAP))],
    ids=["modelopt", "compressed-tensors", "mixed"],
)
def test_nvfp4_is_planned_on_the_cpu(form: str, declared: Any, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", tensors(form), {"quantization_config": declared})
    assert plan(folder, target="cpu").target.name == "cpu"

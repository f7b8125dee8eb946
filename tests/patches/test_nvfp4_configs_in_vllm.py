"""vLLM's own config classes read what the plan gives them, where the checkpoint's own config
stops or misleads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nibble.plan.gather import plan_for, read_wishes
from tests.support.models.tiny_checkpoint import LINEAR_SHAPES, Tensors, tensors, write_checkpoint
from tests.support.models.tiny_model import MODELOPT_NVFP4

pytestmark = pytest.mark.vllm

LAYERS = {
    f"model.layers.0.{name}": {"quant_algo": "NVFP4", "group_size": 16} for name in LINEAR_SHAPES
}
INPUTS = {
    "num_bits": 4,
    "type": "float",
    "group_size": 16,
    "strategy": "tensor_group",
    "symmetric": True,
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": INPUTS,
            "input_activations": INPUTS | {"dynamic": "local"},
        }
    },
}


def legacy(algorithm: str, producer: str = "modelopt", **more: Any) -> dict[str, Any]:
    inner = {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    }
    return {"producer": {"name": producer, "version": "0.29.0"}, "quantization": inner | more}


def read_by_vllm(folder: Path, overrides: Mapping[str, Any]) -> Any:
    """The quantization config object vLLM would build the model with; None: it would take it for
    unquantized.
    """
    from vllm.config import ModelConfig
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.weight_utils import get_quant_config

    model = ModelConfig(model=str(folder), hf_overrides=dict(overrides), skip_tokenizer_init=True)
    return get_quant_config(model, LoadConfig()) if model.quantization else None


def planned(folder: Path) -> Any:
    choice = plan_for(read_wishes([str(folder), "--target", "gb10"], {})).args["--hf-overrides"]
    return read_by_vllm(folder, choice.value)


def checkpoint(
    folder: Path, weights: Tensors, declared: Any = None, hf_quant_config: Any = None
) -> Path:
    config = {"quantization_config": declared} if declared else {}
    return write_checkpoint(folder / "m", weights, config, hf_quant_config)


@pytest.mark.parametrize("algorithm", ["W4A16_NVFP4", "MIXED_PRECISION", "MXFP8"])
def test_an_algorithm_that_vllm_refuses_in_a_legacy_file_is_read_from_the_override(
    algorithm: str, tmp_path: Path
) -> None:
    form = {"W4A16_NVFP4": "w4a16", "MIXED_PRECISION": "nvfp4", "MXFP8": "fp8"}[algorithm]
    folder = checkpoint(tmp_path, tensors(form), None, legacy(algorithm, quantized_layers=LAYERS))
    with pytest.raises(ValueError, match=f"Unknown ModelOpt quant algo: {algorithm}"):
        read_by_vllm(folder, {})
    config = planned(folder)
    if algorithm == "MIXED_PRECISION":
        assert (config.get_name(), config.quantized_layers) == ("modelopt_mixed", LAYERS)
        assert config.kv_cache_quant_method == "FP8"
    else:
        assert (config.quant_method, config.exclude_modules) == (algorithm, ["lm_head"])
        assert config.kv_cache_quant_algo == "FP8"


def test_a_legacy_file_of_another_producer_is_no_quantization_to_vllm_alone(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, tensors("nvfp4"), None, legacy("NVFP4", "somebody"))
    assert read_by_vllm(folder, {}) is None
    assert planned(folder).quant_method == "NVFP4"


def test_a_weight_only_export_is_w4a4_to_vllm_alone(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, tensors("w4a16"), MODELOPT_NVFP4)
    assert read_by_vllm(folder, {}).quant_method == "NVFP4"
    assert planned(folder).quant_method == "W4A16_NVFP4"


def test_a_weight_only_export_of_mixed_layers_is_relabelled_layer_by_layer(tmp_path: Path) -> None:
    declared = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": LAYERS,
    }
    config = planned(checkpoint(tmp_path, tensors("w4a16"), declared))
    assert {entry["quant_algo"] for entry in config.quantized_layers.values()} == {"W4A16_NVFP4"}
    assert config._resolve_quant_algo("model.layers.0.mlp.down_proj") == "W4A16_NVFP4"


def test_a_weight_only_export_of_compressed_tensors_has_no_input_activations(
    tmp_path: Path,
) -> None:
    folder = checkpoint(tmp_path, tensors("ct"), COMPRESSED)
    assert read_by_vllm(folder, {}).target_scheme_map["Linear"]["input_activations"] is not None
    assert planned(folder).target_scheme_map["Linear"]["input_activations"] is None

"""vLLM's own config classes exclude what `--hf-overrides` of the plan says, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nibble.plan.gather import plan_for, read_wishes
from tests.support.models.tiny_checkpoint import linear, tensors, write_checkpoint
from tests.support.models.tiny_model import MODELOPT_NVFP4

pytestmark = pytest.mark.vllm

WORDS = ["--target", "gb10", "--speculative-config", '{"method":"mtp","num_speculative_tokens":1}']
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
QUANTIZED = ("model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.gate_up_proj")
PLAIN = ("lm_head", "mtp.fc", "mtp.layers.0.self_attn.qkv_proj", "mtp.layers.0.mlp.experts")


def checkpoint(folder: Path, form: str, quantization: dict[str, Any]) -> Path:
    """A layer in `form` and a BF16 MTP head that its config does not exclude."""
    weights = tensors(form) | linear("mtp.fc", 64, 128, "bf16")
    for name in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.experts.0.gate_proj",
    ):
        weights |= linear(f"mtp.layers.0.{name}", 64, 64, "bf16")
    return write_checkpoint(folder, weights, {"quantization_config": quantization})


def as_vllm_reads_it(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The quantization config of the checkpoint in vLLM, without and with the plan's words."""
    from vllm.config.model import ModelConfig
    from vllm.transformers_utils.config import get_config

    words = plan_for(read_wishes([str(folder), *WORDS], {})).argv()
    overrides = json.loads(words[words.index("--hf-overrides") + 1])
    before = get_config(str(folder), trust_remote_code=False)
    after = get_config(str(folder), trust_remote_code=False)
    ModelConfig._apply_dict_overrides(SimpleNamespace(), after, overrides)  # type: ignore[arg-type]
    return before.quantization_config, after.quantization_config


def test_modelopt_excludes_the_mtp_head_only_with_the_override(tmp_path: Path) -> None:
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    def excluded(config: dict[str, Any]) -> list[str]:
        read = ModelOptNvFp4Config.from_config(config)
        read.packed_modules_mapping = FUSED
        return [name for name in (*QUANTIZED, *PLAIN) if read.is_layer_excluded(name)]

    before, after = as_vllm_reads_it(checkpoint(tmp_path / "m", "nvfp4", MODELOPT_NVFP4))
    assert excluded(before) == ["lm_head"]
    assert excluded(after) == list(PLAIN)


def test_compressed_tensors_ignores_the_mtp_head_only_with_the_override(tmp_path: Path) -> None:
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

    names = [
        name if not name.endswith("experts") else f"{name}.0.gate_proj"
        for name in (*QUANTIZED, *PLAIN)
    ]

    def ignored(config: dict[str, Any]) -> list[str]:
        read = CompressedTensorsConfig.from_config(dict(config))
        return [name for name in names if should_ignore_layer(name, read.ignore, FUSED)]

    scheme = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
    }
    group = {
        "targets": ["Linear"],
        "weights": scheme,
        "input_activations": scheme | {"dynamic": "local"},
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    before, after = as_vllm_reads_it(checkpoint(tmp_path / "m", "ct_w4a4", quantization))
    assert ignored(before) == ["lm_head"]
    assert ignored(after) == names[len(QUANTIZED) :]

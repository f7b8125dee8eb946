"""Generated NVFP4 checkpoints of other families: a generated Qwen3 with other tensors and another
config.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.models.generated_nvfp4 import Shape, write_checkpoint

SHAPE = Shape()


def changed(folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """A generated Qwen3 with other tensors and another config."""
    write_checkpoint(folder, SHAPE, "modelopt")
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def as_llama(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Without norms of queries and keys."""
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    for name in [name for name in tensors if "_norm.weight" in name and "self_attn" in name]:
        del tensors[name]


def as_llama_with_a_window(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Each layer sees 20 tokens."""
    as_llama(config, tensors)
    config |= {"layer_types": ["sliding_attention"] * SHAPE.layers, "sliding_window": 20}


def as_mistral(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Llama's layers by other classes."""
    as_llama(config, tensors)
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


def as_qwen2(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Biases of queries, keys and values; one KV head."""
    as_llama(config, tensors)
    config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    config["num_attention_heads"] = SHAPE.hidden // SHAPE.head_dim
    config["num_key_value_heads"] = 1
    torch.manual_seed(0)
    sizes = {"q": SHAPE.hidden, "k": SHAPE.head_dim, "v": SHAPE.head_dim}
    for layer in range(SHAPE.layers):
        attention = f"model.layers.{layer}.self_attn"
        for part, size in sizes.items():
            for end in ("weight", "weight_scale"):
                name = f"{attention}.{part}_proj.{end}"
                tensors[name] = tensors[name][:size].clone()
            tensors[f"{attention}.{part}_proj.bias"] = torch.randn(size).bfloat16() * 0.3
        for end in ("weight", "weight_scale"):
            name = f"{attention}.o_proj.{end}"
            columns = tensors[name].shape[1] * SHAPE.hidden // (SHAPE.heads * SHAPE.head_dim)
            tensors[name] = tensors[name][:, :columns].clone()

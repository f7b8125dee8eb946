"""Makes nibble/checkpoint/layer_tensors.json, once for each release of transformers.

    python tests/support/models/layer_tensors.py

For every family it saves a model of transformers whose sizes all differ, so that each number in a
shape has one meaning.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[3] / "nibble/checkpoint/layer_tensors.json"
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY = 48, 6, 2, 20, 136, 152
EXPERT, EXPERTS, SHARED, SHARED_COUNT = 56, 7, 72, 3
SYMBOLS: dict[int, str] = {
    1: "1",
    HIDDEN: "hidden",
    HEADS: "heads",
    HEAD_DIM: "head",
    HEADS * HEAD_DIM: "heads*head",
    KV_HEADS * HEAD_DIM: "kv*head",
    (HEADS + 2 * KV_HEADS) * HEAD_DIM: "heads*head+2*kv*head",
    INTERMEDIATE: "intermediate",
    2 * INTERMEDIATE: "2*intermediate",
    VOCABULARY: "vocabulary",
    EXPERT: "expert",
    2 * EXPERT: "2*expert",
    EXPERTS: "experts",
    SHARED: "shared",
    SHARED_COUNT * EXPERT: "shared_experts*expert",
    HIDDEN // HEADS: "hidden/heads",
    KV_HEADS * HIDDEN // HEADS: "kv*hidden/heads",
    HIDDEN + 2 * KV_HEADS * HIDDEN // HEADS: "hidden+2*kv*hidden/heads",
}
BASE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
MOE: dict[str, Any] = {
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": EXPERT,
    "n_shared_experts": SHARED_COUNT,
    "shared_expert_intermediate_size": SHARED,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
# Families whose layers are all alike, or of two kinds: with experts and without.
DENSE = (
    "llama",
    "mistral",
    "ministral3",
    "qwen2",
    "qwen3",
    "phi3",
    "granite",
    "gemma",
    "gemma2",
    "gemma3_text",
    "olmo2",
    "olmo3",
    "glm4",
    "cohere2",
    "exaone4",
    "nemotron",
    "seed_oss",
    "smollm3",
    "ernie4_5",
    "hunyuan_v1_dense",
    "starcoder2",
)
WITH_EXPERTS = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "granitemoe", "glm4_moe", "gpt_oss")
# What some checkpoints of a family have and others have not.
VARIANTS: tuple[dict[str, Any], ...] = (
    {"attention_bias": True},
    {"mlp_bias": True},
    {"use_qk_norm": True},
    {"qkv_bias": True},
    {"use_bias": True},
)
_LAYER = re.compile(r"^(?:model|transformer)\.layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")


def saved(model_type: str, **changes: Any) -> dict[str, list[int]]:
    """Name -> shape of what transformers saves."""
    import torch
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        model_type, **(BASE | (MOE if model_type in WITH_EXPERTS else {}) | changes)
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(f"{folder}/model.safetensors", framework="pt") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def described(model_type: str) -> dict[str, Any]:
    """Shapes of a family in symbols: of its layers, and of what is beside them."""
    layer: dict[str, list[str]] = {}
    beside: dict[str, list[str]] = {}
    for changes in ({}, *VARIANTS):
        for name, shape in saved(model_type, **changes).items():
            symbols = [SYMBOLS[size] for size in shape]
            if match := _LAYER.match(name):
                leaf = _EXPERT.sub("*", match[2])
                layer.setdefault(leaf, symbols)
            else:
                beside.setdefault(name.removeprefix("model."), symbols)
    return {"layer": layer, "beside": beside}


def table() -> dict[str, Any]:
    """Every family."""
    logging.disable(logging.WARNING)
    found: defaultdict[str, Any] = defaultdict(dict)
    for model_type in (*DENSE, *WITH_EXPERTS):
        found[model_type] = described(model_type)
    return dict(found)


def text(found: dict[str, Any]) -> str:
    """One line a family's part."""
    families = [
        f'"{name}": {{\n'
        + ",\n".join(f'"{key}": {json.dumps(part)}' for key, part in family.items())
        + "}"
        for name, family in found.items()
    ]
    return "{\n" + ",\n".join(families) + "\n}\n"


if __name__ == "__main__":
    made = text(table())
    FILE.write_text(made) if len(sys.argv) == 1 else print(made)

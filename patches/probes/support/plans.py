"""nibble's own plan for a model and a target, as `nibble plan` makes it: what a remedy outside
vLLM's tree amounts to.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.plan import Plan

NVFP4_MOE: Mapping[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "vocab_size": 128,
    "max_position_embeddings": 1024,
    "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}
HEADER = b'{"model.embed_tokens.weight":{"dtype":"BF16","shape":[128,64],"data_offsets":[0,16384]}}'
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(16384)  # a safetensors file


def plan(target: str, *words: str, **environ: str) -> Plan:
    """The plan for a small NVFP4 MoE model in a folder. Raises NibbleError where nibble refuses."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(NVFP4_MOE))
        (Path(folder) / "model.safetensors").write_bytes(WEIGHTS)
        return plan_for(read_wishes([folder, "--target", target, *words], environ))

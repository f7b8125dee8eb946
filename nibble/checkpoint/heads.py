"""Attention heads by config.json: how many keep keys and values, and their size."""

from __future__ import annotations

from nibble.checkpoint.layer_memory import Config


def head_dim(text: Config) -> int:
    """Dimensions of a head, stated or hidden size over heads."""
    return int(
        text.get("head_dim")
        or DEFAULT_HEAD_DIM.get(text["model_type"])
        or text["hidden_size"] // text["num_attention_heads"]
    )


def kv_heads(text: Config) -> int:
    """Heads of K and V: stated, or transformers' default where config.json does not name them;
    null is all heads.
    """
    default = 0 if "num_key_value_heads" in text else DEFAULT_KV_HEADS.get(text["model_type"])
    return int(text.get("num_key_value_heads") or default or text["num_attention_heads"])


# Transformers leaves a value out of a nested config where it equals the class's default.
DEFAULT_HEAD_DIM = {
    "gemma": 256,
    "gemma2": 256,
    "gemma3_text": 256,
    "gemma3n_text": 256,
    "gemma4_text": 256,
    "gemma4_unified_text": 256,
    "qwen3": 128,
    "qwen3_vl_text": 128,
    "qwen3_next": 256,
    "qwen3_5_text": 256,
    "qwen3_5_moe_text": 256,
    "gpt_oss": 64,
    "ministral3": 128,
    "glm4": 128,
    "seed_oss": 128,
    "ernie4_5": 128,
    "minimax_m2": 128,
    "afmoe": 128,
    "laguna": 128,
    "hy_v3": 128,
    "step3p5": 128,
    "muse_glimmer_text": 128,
    "nemotron_h": 128,
}
# Families whose default is a number; in all others it is num_attention_heads.
DEFAULT_KV_HEADS = {
    "mistral": 8,
    "ministral3": 8,
    "mixtral": 8,
    "seed_oss": 8,
    "gpt_oss": 8,
    "glm4_moe": 8,
    "qwen2": 32,
    "qwen3": 32,
    "exaone4": 32,
    "gemma": 16,
    "qwen2_moe": 16,
    "gemma2": 4,
    "gemma3_text": 4,
    "gemma4_text": 4,
    "gemma4_unified_text": 4,
    "gemma3n_text": 2,
    "smollm3": 4,
    "qwen3_moe": 4,
    "glm4": 2,
    "ernie4_5": 2,
    "starcoder2": 2,
    "qwen2_vl_text": 8,
    "qwen2_5_vl_text": 8,
    "qwen3_vl_text": 32,
    "qwen3_vl_moe_text": 16,
    "minimax_m2": 8,
    "laguna": 8,
    "hy_v3": 8,
    "qwen3_next": 2,
    "qwen3_5_text": 4,
    "qwen3_5_moe_text": 2,
    "step3p5": 8,
    "muse_glimmer_text": 2,
    "nemotron_h": 8,
    "jamba": 8,
    "lfm2": 8,
    "lfm2_moe": 8,
}

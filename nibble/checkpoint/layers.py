"""Which layers of a model keep memory per sequence, and how much of it: from config.json alone.

A family is listed here only after its layers were compared with vLLM 0.32's KV cache specs
(tests/e2e/test_kv_matches_vllm.py). For any other the answer is None: unknown, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nibble.checkpoint.attention_layers import attention, gemma_shared, latent, muse, step
from nibble.checkpoint.layer_memory import Config, LayerMemory, Layers
from nibble.checkpoint.state_layers import (
    delta_net,
    granite_hybrid,
    jamba,
    mamba1,
    mamba2,
    nemotron_h,
    short_conv,
)

NESTED = ("text_config", "llm_config", "language_config", "thinker_config")


def text_config(config: Config) -> Config:
    """The part of config.json that describes the language model."""
    for key in NESTED:
        nested = config.get(key)
        if isinstance(nested, Mapping) and nested:
            return text_config(nested)
    return config


def layers(config: Config) -> Layers | None:
    """Every layer of the language model, then its draft layers; None where the architecture is
    not known here.
    """
    text = text_config(config)
    model_type = str(text.get("model_type") or config.get("model_type") or "")
    family = FAMILIES.get(model_type)
    if family is None:
        return None
    try:
        return tuple(family({**text, "model_type": model_type}))
    except (KeyError, TypeError, ValueError, ZeroDivisionError, IndexError):
        return None  # a config without the keys its family needs


# Every layer keeps keys and values, over all tokens or over a window.
ATTENTION = """
    llama mistral ministral3 mixtral qwen2 qwen2_moe qwen3 qwen3_moe qwen2_vl qwen2_vl_text
    qwen2_5_vl qwen2_5_vl_text qwen3_vl_text qwen3_vl_moe_text phi3 granite granitemoe glm4
    glm4_moe minimax_m2 gemma gemma2 gemma3_text gpt_oss afmoe laguna olmoe cohere2 exaone4
    nemotron hy_v3 seed_oss cloverlm
"""
FAMILIES: Mapping[str, Callable[[Config], list[LayerMemory]]] = {
    **dict.fromkeys(ATTENTION.split(), attention),
    **dict.fromkeys(("gemma3n_text", "gemma4_text", "gemma4_unified_text"), gemma_shared),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), latent),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), delta_net
    ),
    **dict.fromkeys(("step3p5", "step3p7_text"), step),
    **dict.fromkeys(("muse_glimmer", "muse_glimmer_text"), muse),
    "nemotron_h": nemotron_h,
    "mamba": mamba1,
    "falcon_mamba": mamba1,
    "mamba2": mamba2,
    "jamba": jamba,
    "granitemoehybrid": granite_hybrid,
    **dict.fromkeys(("lfm2", "lfm2_moe"), short_conv),
}

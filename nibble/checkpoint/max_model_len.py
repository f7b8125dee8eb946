"""The longest sequence of a model by its config: the declared length and rotary scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# vllm 0.32 model_arch_config_convertor.py:396
LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# Kinds of rotary scaling whose max_position_embeddings is the scaled length (vllm 0.32
# config/model.py:2595).
SCALED_LENGTH = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")


def max_model_len(text: Mapping[str, Any]) -> int | None:
    """The longest sequence that vLLM accepts by default for this model."""
    lengths = [text[key] for key in LENGTH_KEYS if isinstance(text.get(key), int)]
    if not lengths:
        return None
    factor = 1.0
    if "gemma3" not in str(text.get("model_type")):
        for rotary in _rotary(text):
            kind = rotary.get("rope_type") or rotary.get("type")
            factor = factor if kind in SCALED_LENGTH else rotary.get("factor") or factor
    return int(min(lengths) * factor)


def _rotary(text: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Rotary parameters: one set, or one for each kind of layer."""
    found = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(found, Mapping):
        return []
    nested = [value for value in found.values() if isinstance(value, Mapping)]
    return nested or [found]

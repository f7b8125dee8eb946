"""RoPE's scaling as config.json states it."""

from __future__ import annotations

import math
from typing import Any

from nibble.checkpoint.gguf.keys import Keys, head_dim

ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1's, which config.json states as four numbers


def rope_scaling(keys: Keys) -> dict[str, Any] | None:
    """The entry of config.json, None for unscaled RoPE. Raises CONFIG for a kind that it cannot
    state.
    """
    kind = keys.get("rope.scaling.type")
    factors = keys.file.tensors.get(ROPE_FACTORS)
    if factors is not None:
        return _llama3_scaling(keys, [float(value) for value in factors.data])
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise keys.refused("rope.scaling.type", f"nibble does not convert RoPE of type {kind}")
    found: dict[str, Any] = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        length = keys.get("rope.scaling.original_context_length")
        found["original_max_position_embeddings"] = length or keys.number("context_length")
        for name in ("beta_fast", "beta_slow"):
            if (value := keys.get(f"rope.scaling.yarn_{name}")) is not None:
                found[name] = value
    return found


def _llama3_scaling(keys: Keys, factors: list[float]) -> dict[str, Any]:
    """The numbers of Llama 3.1's RoPE that give these factors.

    The file has only the factors; every published model has 1, 4 and 8192, and 8 or 32 as the
    largest. Raises CONFIG where they give other factors.
    """
    found = {
        "rope_type": "llama3",
        "factor": max(factors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = llama3_factors(keys.number("rope.freq_base", 10000.0), head_dim(keys), found)
    if len(expected) != len(factors) or not all(
        math.isclose(one, other, rel_tol=1e-3) for one, other in zip(expected, factors, strict=True)
    ):
        what = f"{ROPE_FACTORS} holds factors that are not those of Llama 3.1's RoPE"
        raise keys.refused("rope.freq_base", what)
    return found


def llama3_factors(base: float, head_dim: int, scaling: dict[str, Any]) -> list[float]:
    """By what Llama 3.1's RoPE divides each frequency
    (transformers modeling_rope_utils.py, _compute_llama3_parameters).
    """
    length, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    found = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * base ** (index / head_dim)
        smooth = min(max((length / wavelength - low) / (high - low), 0.0), 1.0)
        found.append(1 / ((1 - smooth) / factor + smooth))
    return found

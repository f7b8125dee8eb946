"""The quantization config that vLLM 0.32 needs if the checkpoint's does not load right.

`hf_quant_config.json` alone (ModelOpt before 0.31): vLLM raises for algorithms that it does not
expect there, for other producers and for a missing key
(transformers_utils/model_arch_config_convertor.py:285, modelopt.py _from_config). It reads the same
content in the form of config.json.

W4A4 by its label but weight-only by its tensors (ModelOpt before 0.45): vLLM computes with
uninitialised activation scales.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nibble.checkpoint.modelopt import MODELOPT
from nibble.checkpoint.nvfp4 import EXPERT
from nibble.checkpoint.scheme import Scheme

Config = Mapping[str, Any]
# What vLLM 0.32 knows in hf_quant_config.json alone, and the keys it wants there of NVFP4.
LEGACY_ALGORITHMS = ("NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
LEGACY_KEYS = ("group_size", "kv_cache_quant_algo", "exclude_modules")


@dataclass(frozen=True)
class VllmConfig:
    """A quantization config for vLLM, and why it differs from the checkpoint's (empty: it does
    not).
    """

    config: Config = field(repr=False)
    reasons: tuple[str, ...] = ()


def config_for_vllm(
    config: Config, hf_quant_config: Config | None, scheme: Scheme
) -> VllmConfig | None:
    """The config for a checkpoint of `scheme`; None where it declares no quantization."""
    declared = declared_config(config, hf_quant_config)
    if declared is None:
        return None
    reasons = []
    if declared is hf_quant_config and _is_unread(declared):
        declared = modern(declared)
        reasons.append("vLLM 0.32 does not read its hf_quant_config.json")
    elif declared is not hf_quant_config and hf_quant_config is not None:
        declared = _with_layers(declared, hf_quant_config)
    if scheme.is_relabelled:
        declared = weight_only(declared)
        reasons.append("it is labelled W4A4 and has no activation scales")
    return VllmConfig(declared, tuple(reasons))


def declared_config(config: Config, hf_quant_config: Config | None) -> Config | None:
    """The quantization config that vLLM finds, in its order: transformers_utils/config.py:890-902,
    then weight_utils.py:235-242.
    """
    text = config.get("text_config")
    places = (
        config.get("quantization_config"),
        hf_quant_config,
        text.get("quantization_config") if isinstance(text, Mapping) else None,
        config.get("compression_config"),
    )
    return next((place for place in places if isinstance(place, Mapping) and place), None)


def algorithm(declared: Config) -> str:
    """ModelOpt's quant_algo, in either form of its config; empty for other formats."""
    return str(_inner(declared).get("quant_algo") or "").upper()


def _inner(declared: Config) -> Config:
    inner = declared.get("quantization")
    return inner if isinstance(inner, Mapping) else declared


def _is_unread(legacy: Config) -> bool:
    """Whether vLLM 0.32 refuses or ignores a known algorithm in hf_quant_config.json alone."""
    name, producer = algorithm(legacy), legacy.get("producer")
    if name not in (*MODELOPT, "MIXED_PRECISION"):
        return False
    if (
        not isinstance(producer, Mapping)
        or producer.get("name") != "modelopt"
        or name not in LEGACY_ALGORITHMS
    ):
        return True
    return name == "NVFP4" and any(key not in _inner(legacy) for key in LEGACY_KEYS)


def modern(legacy: Config) -> dict[str, Any]:
    """hf_quant_config.json in the form that ModelOpt 0.31 and later write into config.json."""
    inner = _inner(legacy)
    found: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": algorithm(legacy),
                             "ignore": list(inner.get("exclude_modules") or ())}  # fmt: skip
    if isinstance(producer := legacy.get("producer"), Mapping):
        found["producer"] = dict(producer)
    if inner.get("group_size") is not None:
        found["group_size"] = inner["group_size"]
    kv_cache = inner.get("kv_cache_quant_algo")
    if kv_cache:
        fp8 = {"dynamic": False, "num_bits": 8, "type": "float"}
        found["kv_cache_scheme"] = fp8 if str(kv_cache).upper() == "FP8" else kv_cache
    if isinstance(layers := inner.get("quantized_layers"), Mapping):
        found["quantized_layers"] = one_expert_a_layer(layers)
    return found


def _with_layers(declared: Config, hf_quant_config: Config) -> Config:
    """The config with the map of layers of hf_quant_config.json: for MIXED_PRECISION, ModelOpt
    before 0.43 writes it there alone, where vLLM reads it.
    """
    layers = _inner(hf_quant_config).get("quantized_layers")
    if (
        algorithm(declared) != "MIXED_PRECISION"
        or "quantized_layers" in _inner(declared)
        or not layers
    ):
        return declared
    return {**declared, "quantized_layers": layers}


def one_expert_a_layer(layers: Mapping[str, Any]) -> dict[str, Any]:
    """A map of quantized layers with one entry for all equal experts of a layer.

    vLLM looks up the experts of a layer as a whole and takes the first entry below it
    (modelopt.py:1755); a map of every expert would not fit a command line.
    """
    kinds: dict[str, set[str]] = {}
    for name, entry in layers.items():
        if match := EXPERT.match(name):
            kinds.setdefault(match[1], set()).add(str(entry))
    kept: dict[str, Any] = {}
    seen: set[str] = set()
    for name, entry in layers.items():
        match = EXPERT.match(name)
        if match and len(kinds[match[1]]) == 1:
            if match[1] in seen:
                continue
            seen.add(match[1])
        kept[name] = entry
    return kept


def weight_only(declared: Config) -> dict[str, Any]:
    """The same config with unquantized activations for NVFP4 weights."""
    if re.sub("_", "-", str(declared.get("quant_method", ""))) == "compressed-tensors":
        groups = declared.get("config_groups") or {}
        return {
            **declared,
            "config_groups": {name: _group(group) for name, group in groups.items()},
        }
    inner = dict(_inner(declared))
    if algorithm(declared) == "MIXED_PRECISION":
        layers = inner.get("quantized_layers") or {}
        inner["quantized_layers"] = {
            name: _layer(entry) for name, entry in one_expert_a_layer(layers).items()
        }
        inner.pop("config_groups", None)  # they repeat the map, and vLLM does not read them here
    else:
        inner["quant_algo"] = "W4A16_NVFP4"
    return inner if "quantization" not in declared else modern({**declared, "quantization": inner})


def _group(group: Config) -> dict[str, Any]:
    weights = group.get("weights") or {}
    is_nvfp4 = weights.get("num_bits") == 4 and weights.get("group_size") == 16
    return {**group, "input_activations": None} if is_nvfp4 else dict(group)


def _layer(entry: Config) -> dict[str, Any]:
    is_w4a4 = str(entry.get("quant_algo")).upper() == "NVFP4"
    return {**entry, "quant_algo": "W4A16_NVFP4"} if is_w4a4 else dict(entry)

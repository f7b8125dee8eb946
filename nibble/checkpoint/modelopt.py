"""Quantization schemes that ModelOpt declares, in config.json or hf_quant_config.json.

vLLM 0.32 reads them in model_executor/layers/quantization/modelopt.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nibble.checkpoint.headers import TensorInfo
from nibble.checkpoint.scheme import Config, Scheme

# ModelOpt algorithm -> (our name, vLLM's --quantization, bits, activations); vllm 0.32 modelopt.py
# LINEAR_ALGOS.
MODELOPT: Mapping[str, tuple[str, str, int, str]] = {
    "NVFP4": ("NVFP4", "modelopt_fp4", 4, "fp4"),
    "W4A16_NVFP4": ("W4A16_NVFP4", "modelopt_fp4", 4, "bf16"),
    "FP8": ("FP8", "modelopt", 8, "fp8"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("FP8_PER_CHANNEL_PER_TOKEN", "modelopt", 8, "fp8"),
    "FP8_PB_WO": ("FP8_PB_WO", "modelopt", 8, "fp8"),
    "MXFP8": ("MXFP8", "modelopt_mxfp8", 8, "fp8"),
}


def from_hf_quant_config(hf: Config, tensors: Mapping[str, TensorInfo] | None) -> Scheme:
    """The scheme where only hf_quant_config.json names it, as ModelOpt <= 0.29 exports.

    vllm_config.py rewrites what vLLM does not read of that file.
    """
    scheme = modelopt(hf, tensors)
    note = (
        "only hf_quant_config.json says how it is quantized; config.json has no quantization_config"
    )
    return replace(scheme, notes=(note, *scheme.notes))


def algorithm_of(declared: Config) -> str:
    """`quant_algo` of a config, in upper case; empty without one."""
    inner = declared.get("quantization")
    place = inner if isinstance(inner, Mapping) else declared
    return str(place.get("quant_algo") or "").upper()


def modelopt(declared: Config, tensors: Mapping[str, TensorInfo] | None) -> Scheme:
    """The scheme of a quantization config of ModelOpt."""
    inner = declared.get("quantization")
    place: Config = inner if isinstance(inner, Mapping) else declared
    algorithm = algorithm_of(declared)
    kv_cache = modelopt_kv_cache(declared)
    if algorithm == "MIXED_PRECISION":
        return _mixed(place, kv_cache)
    if algorithm not in MODELOPT:
        known = ", ".join((*MODELOPT, "MIXED_PRECISION"))
        bits = 4 if "4" in algorithm else 8
        reads = f"vLLM 0.32 reads these ModelOpt algorithms: {known}"
        reason = reads if algorithm else f"its quantization config names no quant_algo; {reads}"
        return Scheme(
            algorithm or "modelopt",
            None,
            bits,
            "unknown",
            kv_cache,
            is_nvfp4="NVFP4" in algorithm,
            unsupported_reason=reason,
        )
    name, vllm_name, bits, activations = MODELOPT[algorithm]
    scheme = Scheme(name, vllm_name, bits, activations, kv_cache, is_nvfp4="NVFP4" in name)
    if scheme.is_nvfp4 and not _is_16(place.get("group_size")):
        reason = f"its config says groups of {place['group_size']}, and NVFP4 has groups of 16"
        return replace(scheme, unsupported_reason=reason)
    if algorithm == "NVFP4":
        return _without_activations(scheme, declared)
    if algorithm == "W4A16_NVFP4" and tensors and any(n.endswith(".input_scale") for n in tensors):
        note = "it is labelled W4A16_NVFP4 and has input_scale tensors, which vLLM ignores"
        return replace(scheme, notes=(note,))
    return scheme


def _is_16(group_size: Any) -> bool:
    """Whether vLLM 0.32 reads a group size of 16 (modelopt.py:380): null means NVFP4's size, and
    text is parsed.
    """
    try:
        return group_size is None or int(group_size) == 16
    except (TypeError, ValueError, OverflowError):
        return False


def _without_activations(scheme: Scheme, declared: Config) -> Scheme:
    """The scheme for NVFP4 whose config groups quantize no activations: vLLM 0.32 uses its W4A16
    method.
    """
    groups = (declared.get("config_groups") or {}).values()
    if groups and not any(isinstance(g, Mapping) and g.get("input_activations") for g in groups):
        return replace(
            scheme,
            name="W4A16_NVFP4",
            activations="bf16",
            detail="no config group quantizes activations",
        )
    return scheme


def _mixed(place: Config, kv_cache: str | None) -> Scheme:
    layers = place.get("quantized_layers") or {}
    counts = Counter(str((entry or {}).get("quant_algo", "?")).upper() for entry in layers.values())
    detail = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    unknown = [name for name in counts if name not in MODELOPT]
    reason = f"it mixes in {unknown[0]}, which vLLM 0.32 does not know" if unknown else ""
    activations = (
        "+".join(sorted({MODELOPT[name][3] for name in counts if name in MODELOPT})) or "unknown"
    )
    bits = 4 if any("4" in name for name in counts) else 8
    notes = (
        ()
        if layers
        else ("MIXED_PRECISION without quantized_layers: they are taken from the tensors",)
    )
    return Scheme("MIXED_PRECISION", "modelopt_mixed", bits, activations, kv_cache, detail, notes,
                  any("NVFP4" in name for name in counts), reason)  # fmt: skip


def modelopt_kv_cache(declared: Config) -> str | None:
    """vLLM's KV cache dtype for what ModelOpt declares (vllm 0.32 torch_utils.py:457); None
    without a declaration.
    """
    inner = declared.get("quantization")
    place: Config = inner if isinstance(inner, Mapping) else declared
    for found in (
        place.get("kv_cache_scheme"),
        declared.get("kv_cache_scheme"),
        place.get("kv_cache_quant_algo"),
    ):
        if isinstance(found, Mapping):
            if found.get("type") != "float":
                return None
            if found.get("num_bits") == 8:
                return "fp8_e4m3" if found.get("dynamic") is False else None
            return "nvfp4" if found.get("num_bits") == 4 else None
        if isinstance(found, str):
            return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(found.lower())
    return None

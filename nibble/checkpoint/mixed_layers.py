"""MIXED_PRECISION: compares the map of quantized layers with the tensors.

vLLM 0.32 builds a layer that the map omits unquantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nibble.checkpoint.headers import TensorInfo

_ALIASES = (
    "model.language_model.",
    "language_model.model.",
)  # in files, and in vLLM (modelopt.py:1795)


def algorithm_of(weight: TensorInfo, tensors: Mapping[str, TensorInfo]) -> str:
    """ModelOpt's name for the format of a quantized weight; empty where its tensors do not
    determine it.
    """
    stem = weight.name.removesuffix(".weight")
    joint = "." if stem != weight.name else "_"
    prefix = "weight_" if stem == weight.name else ""
    scale = tensors.get(f"{weight.name}_scale") or tensors.get(f"{stem}{joint}{prefix}scale")
    if scale is None:
        return ""
    if weight.dtype == "U8" and scale.dtype == "F8_E4M3":
        return "NVFP4" if f"{stem}{joint}input_scale" in tensors else "W4A16_NVFP4"
    return (
        "FP8" if weight.dtype == "F8_E4M3" and scale.dtype == "F32" and scale.elements == 1 else ""
    )


def corrected_map(
    layers: Mapping[str, Any], quantized: Mapping[str, str], plain: Iterable[str]
) -> tuple[dict[str, Any], list[str]] | None:
    """(a map that matches the tensors, the modules that the old map had wrong).

    `quantized`: module -> algorithm by its tensors. None where they do not determine the algorithm
    of a missing module.
    """
    named = {_plain_name(name) for name in layers}
    experts = {name.partition(".experts.")[0] + ".experts" for name in named if ".experts." in name}
    missing = [name for name in quantized if _plain_name(name) not in named | experts]
    unquantized = {_plain_name(name) for name in plain}
    surplus = [name for name in layers if _plain_name(name) in unquantized]
    if any(not quantized[name] for name in missing):
        return None
    kept = {name: entry for name, entry in layers.items() if name not in surplus}
    added = {name: _entry(quantized[name]) for name in missing}
    return kept | added, sorted(missing + surplus)


def labels(layers: Mapping[str, Any]) -> Callable[[str], str]:
    """The map's label of a module: its entry, or for experts any entry of their layer, as vLLM
    looks it up.
    """
    own = {
        _plain_name(name): str((entry or {}).get("quant_algo", "")).upper()
        for name, entry in layers.items()
    }
    of_experts = {
        name.partition(".experts")[0]: label for name, label in own.items() if ".experts" in name
    }

    def label(module: str) -> str:
        name = _plain_name(module)
        before, experts, _ = name.partition(".experts")
        return own.get(name) or (of_experts.get(before, "") if experts else "")

    return label


def _plain_name(name: str) -> str:
    return name.replace(_ALIASES[0], _ALIASES[1], 1)


def _entry(algorithm: str) -> dict[str, Any]:
    return (
        {"quant_algo": algorithm}
        if algorithm == "FP8"
        else {"quant_algo": algorithm, "group_size": 16}
    )

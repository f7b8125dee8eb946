"""The quantization scheme of a checkpoint, as vLLM 0.32 loads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

Config = Mapping[str, Any]
QUARTET2_PRODUCER = "cloverlm_converter"  # writes tiled scales under ModelOpt's names


@dataclass(frozen=True)
class Scheme:
    """The quantization of a checkpoint.

    `vllm_quantization` is the value vLLM's --quantization would resolve to (None: not quantized).
    `weight_bits` are those of the bulk of the linear layers; `activations` the type they are
    multiplied in; `kv_cache` the vLLM dtype the checkpoint declares. `notes` are contradictions and
    traps; `unsupported_reason` is empty when vLLM 0.32 can load it. `is_relabelled`: W4A4 by its
    config, weight-only by its tensors.
    """

    name: str
    vllm_quantization: str | None
    weight_bits: int
    activations: str
    kv_cache: str | None = None
    detail: str = ""
    notes: tuple[str, ...] = ()
    is_nvfp4: bool = False
    unsupported_reason: str = ""
    is_relabelled: bool = False


def is_w4a4(scheme: Scheme) -> bool:
    """Whether the config declares NVFP4 activations for every NVFP4 weight."""
    kinds = scheme.name.split("+")
    return (
        scheme.is_nvfp4
        and scheme.vllm_quantization != "quartet2"
        and "NVFP4" in kinds
        and "NVFP4A16" not in kinds
    )


def weight_only(scheme: Scheme) -> Scheme:
    """The weight-only scheme of a W4A4 checkpoint without activation scales: activations keep the
    model's type.

    ModelOpt before 0.45 gave weight-only exports the label NVFP4; vLLM 0.32 would read
    uninitialised memory as scales.
    """
    names = {"NVFP4": "W4A16_NVFP4" if scheme.vllm_quantization == "modelopt_fp4" else "NVFP4A16"}
    name = "+".join(names.get(part, part) for part in scheme.name.split("+"))
    note = f"labelled {scheme.name} (W4A4) and without any activation scale: served weight-only"
    activations = "+".join(
        dict.fromkeys("bf16" if part == "fp4" else part for part in scheme.activations.split("+"))
    )
    return replace(
        scheme, name=name, activations=activations, notes=(*scheme.notes, note), is_relabelled=True
    )


def quantization_config(config: Config) -> Config | None:
    """`quantization_config` (or the old `compression_config`) of a config or of its nested text
    model.
    """
    for place in (config, config.get("text_config"), config.get("llm_config")):
        for key in ("quantization_config", "compression_config"):
            if isinstance(place, Mapping) and isinstance(place.get(key), Mapping) and place[key]:
                return place[key]
    return None

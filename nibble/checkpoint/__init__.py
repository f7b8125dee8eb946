"""Describes a model by config.json and safetensors headers from a folder, the cache or the Hub."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from nibble.checkpoint.detect_scheme import detect_scheme
from nibble.checkpoint.exclusions import Modules, read_modules
from nibble.checkpoint.fused_groups import format_problems
from nibble.checkpoint.gguf.file import SUFFIX
from nibble.checkpoint.headers import TensorInfo
from nibble.checkpoint.heads import head_dim as _head_dim
from nibble.checkpoint.kv import block_bytes, sequence_memory
from nibble.checkpoint.layer_memory import LayerMemory, Layers
from nibble.checkpoint.layer_tensors import layer_problems
from nibble.checkpoint.layers import layers, text_config
from nibble.checkpoint.max_model_len import max_model_len
from nibble.checkpoint.missing import missing_tensors
from nibble.checkpoint.mixed_layers import labels
from nibble.checkpoint.nvfp4 import Nvfp4Weight, Problem, find_weights, header_problems
from nibble.checkpoint.scheme import Scheme, is_w4a4, weight_only
from nibble.checkpoint.source import (
    Source,
    download_bytes,
    needs_conversion,
    open_source,
    read_index,
    read_json,
    read_tensors,
)
from nibble.checkpoint.vllm_config import VllmConfig, config_for_vllm, declared_config
from nibble.checkpoint.weights import Weights, expert_counts, measure
from nibble.errors import ExitCode, NibbleError

__all__ = [
    "Checkpoint",
    "LayerMemory",
    "Scheme",
    "Weights",
    "block_bytes",
    "layers",
    "read_checkpoint",
    "sequence_memory",
    "sequence_memory_bytes",
]


@dataclass(frozen=True)
class Checkpoint:
    """A model as its files describe it; None for what they do not say.

    `path` is None while the files are on the Hub only; `is_local` means that the user gave a
    folder. `weights` is None until headers are readable, `layers` for an unknown architecture.
    `modules` exists for a quantization config that lists layers, once headers are readable. `nvfp4`
    holds the NVFP4 weights, `problems` what is wrong in their headers, `missing` what no file seems
    to have. `vllm_config` is the quantization config that vLLM needs. `files` maps each path to its
    bytes; `download_bytes` counts those that a server needs.
    """

    id: str
    path: Path | None
    revision: str | None
    source_kind: Literal["local", "cache", "hub"]
    architecture: str | None
    model_type: str | None
    scheme: Scheme
    weights: Weights | None
    layers: Layers | None
    modules: Modules | None
    max_model_len: int | None
    num_attention_heads: int | None
    num_key_value_heads: int | None
    head_dim: int | None
    hidden_size: int | None
    num_layers: int | None
    vocab_size: int | None
    num_experts: int | None
    experts_per_token: int | None
    dtype: str | None
    has_mtp: bool
    has_vision: bool
    custom_code: bool
    download_bytes: int
    files: Mapping[str, int] = field(repr=False)
    config: Mapping[str, Any] = field(repr=False)
    text_config: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict, repr=False)
    nvfp4: tuple[Nvfp4Weight, ...] = field(default=(), repr=False)
    problems: tuple[Problem, ...] = ()
    missing: tuple[str, ...] = ()
    vllm_config: VllmConfig | None = None

    @property
    def where(self) -> str:
        """The folder or id of its files, as errors name it."""
        return str(self.path or self.id)

    @property
    def is_local(self) -> bool:
        """Whether a folder was given."""
        return self.source_kind == "local"


def read_checkpoint(
    model: str,
    revision: str | None = None,
    *,
    path: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Checkpoint:
    """Read `model`, a folder or an id; with `path`, read that folder and keep `model` as the id.

    Raises NibbleError MODEL (4) for an unknown, gated, unreadable, corrupt or absent model; its
    `unreachable` is set where only the network or a download is missing.
    """
    return read_source(
        open_source(model, revision, os.environ if environ is None else environ, path)
    )


def read_source(source: Source) -> Checkpoint:
    """Read the checkpoint at `source`, as `read_checkpoint` does."""
    config = _read_config(source)
    index = read_index(source)
    tensors = read_tensors(source, index)
    hf_quant = read_json(source, "hf_quant_config.json")
    return describe(source, config, hf_quant, tensors, index[1] if index else {})


def describe(
    source: Source,
    config: dict[str, Any],
    hf_quant: dict[str, Any] | None,
    tensors: Mapping[str, TensorInfo] | None,
    index: Mapping[str, str],
) -> Checkpoint:
    """The checkpoint of these parts; `index` names the file of each tensor. Raises MODEL for a
    value of another kind.
    """
    try:
        return _assemble(source, config, hf_quant, tensors, index)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:  # a list where a number belongs, …
        where = source.path or source.id
        what = (
            f"config.json or hf_quant_config.json of {where} has a value that cannot be read"
            f" ({error})"
        )
        raise NibbleError(
            ExitCode.MODEL,
            what=what,
            expected="a model in Hugging Face format",
            action="download the model again",
        ) from error


def sequence_memory_bytes(
    checkpoint: Checkpoint, tokens: int, kv_cache_dtype: str = "auto", **options: Any
) -> int | None:
    """Bytes of one sequence on one GPU (see `sequence_memory`), or None for an unknown
    architecture. "auto" means the declared type of the KV cache.
    """
    if checkpoint.layers is None:
        return None
    if kv_cache_dtype == "auto":
        kv_cache_dtype = checkpoint.scheme.kv_cache or "auto"
    return sequence_memory(checkpoint.layers, tokens, kv_cache_dtype, **options).total_bytes


def _read_config(source: Source) -> dict[str, Any]:
    """config.json, or params.json of Mistral's format. Raises MODEL without either."""
    config = read_json(source, "config.json")
    if config is None and (params := read_json(source, "params.json")) is not None:
        return {"model_type": "mistral_params", "architectures": [], **params}
    if config is None:
        if files := sorted(file for file in source.files if file.endswith(SUFFIX)):
            where = str(source.path / files[0]) if source.path else files[0]
            what = f"{source.id} holds GGUF files and no config.json"
            raise needs_conversion(what, where)
        where = f"{source.path}/config.json" if source.path else f"config.json of {source.id}"
        what = f"{where} is missing"
        raise NibbleError(
            ExitCode.MODEL,
            what=what,
            expected="a model in Hugging Face format",
            action="check MODEL and its revision",
        )
    return config


def _assemble(
    source: Source,
    config: dict[str, Any],
    hf_quant: dict[str, Any] | None,
    tensors: Mapping[str, TensorInfo] | None,
    index: Mapping[str, str],
) -> Checkpoint:
    text = text_config(config)
    experts, chosen = expert_counts(text)
    count = _whole(text, "num_hidden_layers", "n_layers", "n_layer", "num_blocks")
    weights, missing = None, ()
    if tensors is not None:
        if not tensors:
            what = f"the safetensors files of {source.id} hold no tensors"
            raise NibbleError(
                ExitCode.MODEL,
                what=what,
                expected="the weights of a model",
                action="download the model again",
            )
        weights = measure(tensors, num_layers=count, num_experts=experts, experts_per_token=chosen)
        # Layers of NAS models differ from each other (block_configs).
        missing = missing_tensors(tensors, None if "block_configs" in text else count, index)
    found = layers(config)
    scheme, nvfp4, problems = _nvfp4(
        detect_scheme(config, hf_quant, tensors), config, hf_quant, tensors, count
    )
    if tensors:
        model_type = str(text.get("model_type") or _model_type(config))
        problems += layer_problems(tensors, nvfp4, text, model_type, count)
    needed = config_for_vllm(config, hf_quant, scheme)
    return Checkpoint(
        id=source.id,
        path=source.path,
        revision=source.revision,
        source_kind=source.kind,
        architecture=next(iter(config.get("architectures") or []), None),
        model_type=_model_type(config),
        scheme=scheme,
        weights=weights,
        layers=found,
        modules=read_modules(config, hf_quant, tensors, count, needed.config if needed else None),
        max_model_len=max_model_len(text),
        num_attention_heads=_whole(text, "num_attention_heads", "n_heads", "n_head", "heads"),
        num_key_value_heads=_whole(
            text, "num_key_value_heads", "n_kv_heads", "num_kv_heads", "num_attention_groups"
        ),
        head_dim=_known_head_dim(text),
        hidden_size=_whole(text, "hidden_size", "dim", "n_embd"),
        num_layers=count,
        vocab_size=_whole(text, "vocab_size") or _whole(config, "vocab_size"),
        num_experts=experts,
        experts_per_token=chosen,
        dtype=str(
            text.get("dtype")
            or text.get("torch_dtype")
            or config.get("dtype")
            or config.get("torch_dtype")
            or ""
        )
        or None,
        has_mtp=bool(weights and weights.draft_bytes)
        or any(layer.is_draft for layer in found or ()),
        has_vision=bool(weights and weights.vision_bytes)
        or any(config.get(key) for key in ("vision_config", "vision_encoder")),
        custom_code="auto_map" in config,
        download_bytes=download_bytes(source),
        files=source.files,
        config=config,
        text_config=text,
        tensors=tensors or {},
        nvfp4=nvfp4,
        problems=problems,
        missing=missing,
        vllm_config=needed,
    )


ONLY_NVFP4 = ("NVFP4", "W4A16_NVFP4", "NVFP4A16", "quartet2-packed")


def _nvfp4(
    scheme: Scheme,
    config: Mapping[str, Any],
    hf_quant: Mapping[str, Any] | None,
    tensors: Mapping[str, TensorInfo] | None,
    num_layers: int | None,
) -> tuple[Scheme, tuple[Nvfp4Weight, ...], tuple[Problem, ...]]:
    """The scheme by the tensors, the NVFP4 weights, and problems in their headers."""
    if tensors is None or not (scheme.is_nvfp4 or scheme.vllm_quantization == "modelopt_mixed"):
        return scheme, (), ()
    weights = find_weights(
        tensors,
        is_quartet2=scheme.vllm_quantization == "quartet2",
        only_nvfp4=scheme.name in ONLY_NVFP4,
        num_layers=num_layers,
    )
    label = _label(scheme, config, hf_quant)
    w4a4 = [weight for weight in weights if label(weight) == "NVFP4"]
    served = [weight for weight in w4a4 if not weight.is_draft] or w4a4
    if served and all(weight.input_scale is None for weight in served):
        scheme, w4a4 = weight_only(scheme), []
    # A map may omit all of them
    scheme = replace(scheme, is_nvfp4=scheme.is_nvfp4 or bool(weights))
    modules = {weight.module for weight in w4a4}
    problems = header_problems(weights, modules)
    return (
        scheme,
        weights,
        problems + format_problems(weights, modules, tensors, str(_model_type(config))),
    )


def _label(
    scheme: Scheme, config: Mapping[str, Any], hf_quant: Mapping[str, Any] | None
) -> Callable[[Nvfp4Weight], str]:
    """The config's label of a weight ("NVFP4" for W4A4), or the tensors' where a map omits it."""
    if scheme.vllm_quantization != "modelopt_mixed":
        label = "NVFP4" if is_w4a4(scheme) else ""
        return lambda _: label
    declared = declared_config(config, hf_quant) or {}
    places = (declared, declared.get("quantization"), (hf_quant or {}).get("quantization"))
    found = (place.get("quantized_layers") for place in places if isinstance(place, Mapping))
    named = labels(next((layers for layers in found if isinstance(layers, Mapping)), {}))
    return lambda weight: named(weight.module) or ("NVFP4" if weight.input_scale else "")


def _model_type(config: Mapping[str, Any]) -> str | None:
    return config.get("model_type") or text_config(config).get("model_type")


def _whole(config: Mapping[str, Any], *keys: str) -> int | None:
    value = next((config[key] for key in keys if isinstance(config.get(key), int)), None)
    return None if isinstance(value, bool) else value


def _known_head_dim(text: Mapping[str, Any]) -> int | None:
    try:
        return _head_dim({"model_type": "", **text})
    except (KeyError, TypeError, ZeroDivisionError):
        return None

"""Checkpoints of one tiny Qwen3 layer in every format that nibble reads or refuses by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.models.tiny_model import QWEN3, nbytes, norms, write_safetensors

Tensors = dict[str, tuple[str, list[int]]]
# A family that nibble/checkpoint/layer_tensors.json does not have: any shapes may stand beside
# QWEN3's config.
OTHER_FAMILY: dict[str, Any] = {"model_type": "afmoe"}
LINEAR_SHAPES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}
LINEAR_PARAMETERS = sum(rows * columns for rows, columns in LINEAR_SHAPES.values())


def linear(name: str, rows: int, columns: int, form: str) -> Tensors:
    """The tensors of one linear layer."""
    scales = ("F8_E4M3", [rows, columns // 16])
    packed = ("U8", [rows, columns // 2])
    grouped: Tensors = {
        "qzeros": ("I32", [columns // 32, rows // 8]),
        "scales": ("F16", [columns // 32, rows]),
    }
    forms: dict[str, Tensors] = {
        "bf16": {"weight": ("BF16", [rows, columns])},
        "w4a16": {"weight": packed, "weight_scale": scales, "weight_scale_2": ("F32", [])},
        "fp8": {
            "weight": ("F8_E4M3", [rows, columns]),
            "weight_scale": ("F32", []),
            "input_scale": ("F32", []),
        },
        "ct": {
            "weight_packed": packed,
            "weight_scale": scales,
            "weight_global_scale": ("F32", [1]),
        },
        "quartet2": {
            "weight": ("F4", [rows, columns]),
            "weight_scale": scales,
            "weight_scale_2": ("F32", []),
        },
        "gptq": {"qweight": ("I32", [columns // 8, rows]), "g_idx": ("I32", [columns]), **grouped},
        "awq": {"qweight": ("I32", [columns, rows // 8]), **grouped},
    }
    forms["nvfp4"] = forms["w4a16"] | {"input_scale": ("F32", [])}
    forms["ct_w4a4"] = forms["ct"] | {"input_global_scale": ("F32", [1])}
    return {f"{name}.{leaf}": tensor for leaf, tensor in forms[form].items()}


def tensors(form: str) -> Tensors:
    """One layer with its linear weights in `form`, and BF16 embedding, output head and norms."""
    found: Tensors = {"model.embed_tokens.weight": ("BF16", [128, 64])}
    for name, (rows, columns) in LINEAR_SHAPES.items():
        found |= linear(f"model.layers.0.{name}", rows, columns, form)
    found["model.layers.0.input_layernorm.weight"] = ("BF16", [64])
    return found | {"model.norm.weight": ("BF16", [64]), "lm_head.weight": ("BF16", [128, 64])}


def ones(weights: Tensors) -> dict[str, bytes]:
    """The value 1 for every scale, E4M3 and F32 tensors, and for norms."""
    one = {"F8_E4M3": b"\x38", "F32": struct.pack("<f", 1.0)}
    return norms({name: tensor for name, tensor in weights.items() if tensor[1]}) | {
        name: one[dtype] * (nbytes(dtype, shape) // len(one[dtype]))
        for name, (dtype, shape) in weights.items()
        if dtype in one
    }


def stacked(name: str, experts: int, rows: int, columns: int) -> Tensors:
    """All experts of a layer as one weight, as ModelOpt exports those of Llama 4 and GPT-OSS: K
    in the middle.
    """
    return {
        name: ("U8", [experts, columns // 2, rows]),
        f"{name}_weight_scale": ("F8_E4M3", [experts, columns // 16, rows]),
        f"{name}_weight_scale_2": ("F32", []),
        f"{name}_input_scale": ("F32", []),
    }


def write_checkpoint(
    folder: Path,
    weights: Tensors | None = None,
    config: Mapping[str, Any] | None = None,
    hf_quant_config: Mapping[str, Any] | None = None,
    values: Mapping[str, bytes] | None = None,
) -> Path:
    """A model folder: QWEN3 with `config` over it, and the given weights and hf_quant_config.json.

    Scales are 1, other weights 0, but for the bytes in `values`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({**QWEN3, "tie_word_embeddings": False, **(config or {})})
    )
    (folder / "tokenizer.json").write_text("{}")
    if weights is not None:
        write_safetensors(folder / "model.safetensors", weights, ones(weights) | dict(values or {}))
    if hf_quant_config is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(hf_quant_config))
    return folder

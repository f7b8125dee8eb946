"""Qwen3 and Qwen3-MoE checkpoints of any size with random NVFP4 weights, and the same weights in
BF16.

Global scales are powers of two, so that the BF16 form has exactly the same values; they differ
within every fused layer and between gate and up of every expert. Tensors are made and written one
by one.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from tests.support.models.tiny_model import write_header

Form = Literal["bf16", "modelopt", "compressed-tensors"]
# Times what makes a layer's output as large as its input.
GLOBAL_SCALES = {"q": 1.0, "k": 2.0, "v": 0.5, "o": 1.0, "gate": 1.0, "up": 2.0, "down": 0.5}
INPUT_SCALE = 8 / (6 * 448)  # activations up to 8
FP8_INPUT_SCALE = 8 / 448
DTYPES = {
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; with experts, `intermediate` is one expert's."""

    hidden: int = 64
    intermediate: int = 96
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    vocabulary: int = 128
    experts: int = 0
    chosen: int = 2  # experts of a token
    unquantized: ClassVar = ("mlp.gate",)  # layers of a decoder layer that stay in BF16

    def config(self) -> dict[str, Any]:
        """config.json without quantization."""
        config: dict[str, Any] = {
            "architectures": ["Qwen3MoeForCausalLM" if self.experts else "Qwen3ForCausalLM"],
            "model_type": "qwen3_moe" if self.experts else "qwen3",
            "dtype": "bfloat16",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "head_dim": self.head_dim,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "eos_token_id": 0,
        }
        experts = {
            "num_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "moe_intermediate_size": self.intermediate,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        return config | (experts if self.experts else {})

    def linears(self) -> dict[str, tuple[int, int]]:
        """Name -> rows and columns of what is quantized."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = {
            "q": (query, self.hidden),
            "k": (key, self.hidden),
            "v": (key, self.hidden),
            "o": (self.hidden, query),
        }
        wide, narrow = (self.intermediate, self.hidden), (self.hidden, self.intermediate)
        mlp = {"gate": wide, "up": wide, "down": narrow}
        found = {}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            found |= {f"{prefix}self_attn.{name}_proj": shape for name, shape in attention.items()}
            owners = [f"mlp.experts.{expert}" for expert in range(self.experts)] or ["mlp"]
            found |= {
                f"{prefix}{owner}.{name}_proj": shape
                for owner in owners
                for name, shape in mlp.items()
            }
        return found

    def others(self) -> dict[str, list[int]]:
        """Name -> shape of what stays in BF16."""
        found = {
            "model.embed_tokens.weight": [self.vocabulary, self.hidden],
            "model.norm.weight": [self.hidden],
        }
        found["lm_head.weight"] = [self.vocabulary, self.hidden]
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            for name in ("input_layernorm", "post_attention_layernorm"):
                found[f"{prefix}{name}.weight"] = [self.hidden]
            for name in ("q_norm", "k_norm"):
                found[f"{prefix}self_attn.{name}.weight"] = [self.head_dim]
            if self.experts:
                found[f"{prefix}mlp.gate.weight"] = [self.experts, self.hidden]
        return found

    def fp8_linears(self) -> dict[str, tuple[int, int]]:
        """Name -> rows and columns of what ModelOpt's form has in FP8, a scale for each weight."""
        return {}

    def norm(self, name: str) -> float:
        """The weight of a norm that multiplies by one."""
        return 1.0

    def linear_elements(self) -> int:
        return sum(rows * columns for rows, columns in self.linears().values())


def write_checkpoint(folder: Path, shape: Shape, form: Form, *, w4a4: bool = False) -> Path:
    """config.json and model.safetensors, without a tokenizer; returns the folder. The same shape
    gives the same weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = shape.config()
    if form != "bf16":
        mixed = form == "modelopt" and shape.fp8_linears()
        config["quantization_config"] = (
            mixed_precision(shape, w4a4) if mixed else quantization(form, w4a4, shape.unquantized)
        )
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    described = {
        name: (DTYPES[value.dtype], list(value.shape))
        for name, value in tensors(shape, form, w4a4, "meta")
    }
    with (folder / "model.safetensors").open("wb") as file:
        file.write(write_header(described))
        for _, value in tensors(shape, form, w4a4, "cpu"):
            file.write(value.reshape(-1).view(torch.uint8).numpy().data)
    return folder


def quantization(form: Form, w4a4: bool, unquantized: Iterable[str]) -> dict[str, Any]:
    """config.json's quantization_config."""
    if form == "modelopt":
        four = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
        group = {"targets": ["Linear"], "weights": four} | (
            {"input_activations": four} if w4a4 else {}
        )
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4" if w4a4 else "W4A16_NVFP4",
            "ignore": ["lm_head", *(f"*.{name}" for name in unquantized)],
            "producer": {"name": "modelopt", "version": "0.47.0"},
            "config_groups": {"group_0": group},
        }
    four = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
    }
    group = {
        "targets": ["Linear"],
        "format": "nvfp4-pack-quantized",
        "weights": four | {"dynamic": False},
        "input_activations": four | {"dynamic": "local"} if w4a4 else None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", *(f"re:.*{name}$" for name in unquantized)],
        "config_groups": {"group_0": group},
    }


def mixed_precision(shape: Shape, w4a4: bool) -> dict[str, Any]:
    """The same for a model whose layers differ; layers of experts have one entry."""
    four = {"quant_algo": "NVFP4" if w4a4 else "W4A16_NVFP4", "group_size": 16}
    layers: dict[str, Any] = {}
    for name in shape.linears():
        before, experts, _ = name.partition(".experts.")
        layers[before + experts.removesuffix(".")] = four
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "ignore": [],
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quantized_layers": layers | {name: {"quant_algo": "FP8"} for name in shape.fp8_linears()},
    }


def tensors(shape: Shape, form: Form, w4a4: bool, device: str) -> Iterator[tuple[str, Tensor]]:
    """Names and values in the order of the file; on the meta device nothing is computed."""
    for name, size in shape.others().items():
        yield name, plain(name, size, device, shape.norm(name))
    for name, (rows, columns) in shape.fp8_linears().items():
        scale = 2.0 ** round(math.log2(2 / columns**0.5))
        values = plain(name, [rows, columns], device, deviation=1.0).to(torch.float8_e4m3fn)
        if form == "modelopt":
            yield f"{name}.weight", values
            yield f"{name}.weight_scale", torch.tensor(scale, device=device)
            yield f"{name}.input_scale", torch.tensor(FP8_INPUT_SCALE, device=device)
        else:
            yield f"{name}.weight", values.bfloat16() * scale
    for name, (rows, columns) in shape.linears().items():
        scale = global_scale(name, columns)
        codes, scales = random_nvfp4(name, rows, columns, device)
        if form == "bf16":
            yield f"{name}.weight", to_bf16(codes, scales, scale)
        elif form == "modelopt":
            yield f"{name}.weight", codes
            yield f"{name}.weight_scale", scales
            yield f"{name}.weight_scale_2", torch.tensor(scale, device=device)
            if w4a4:
                yield f"{name}.input_scale", torch.tensor(INPUT_SCALE, device=device)
        else:
            yield f"{name}.weight_packed", codes
            yield f"{name}.weight_scale", scales
            yield f"{name}.weight_global_scale", torch.tensor([1 / scale], device=device)
            if w4a4:
                yield f"{name}.input_global_scale", torch.tensor([1 / INPUT_SCALE], device=device)


def global_scale(name: str, columns: int) -> float:
    """A power of two; a code times its block scale is about 3.4."""
    kind = name.rpartition(".")[2].removesuffix("_proj")
    return GLOBAL_SCALES[kind] * 2.0 ** round(math.log2(1 / (3.4 * columns**0.5)))


def generator_of(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def plain(
    name: str, size: list[int], device: str, norm: float = 1.0, deviation: float = 0.0
) -> Tensor:
    """Equal numbers for norms, and normal ones that make logits differ by some units."""
    if device == "meta":
        return torch.empty(size, dtype=torch.bfloat16, device=device)
    if len(size) == 1:
        return torch.full(size, norm, dtype=torch.bfloat16)
    deviation = deviation or (1.0 if "embed" in name else 2 * size[-1] ** -0.5)
    return (torch.randn(size, generator=generator_of(name)) * deviation).bfloat16()


def random_nvfp4(name: str, rows: int, columns: int, device: str) -> tuple[Tensor, Tensor]:
    """Codes [rows, columns / 2] and scales [rows, columns / 16] from 0.5 to 1.875."""
    if device == "meta":
        scales = torch.empty(rows, columns // 16, dtype=torch.float8_e4m3fn, device=device)
        return torch.empty(rows, columns // 2, dtype=torch.uint8, device=device), scales
    generator = generator_of(name)
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(
        0x30, 0x40, (rows, columns // 16), dtype=torch.uint8, generator=generator
    )
    return codes, scales.view(torch.float8_e4m3fn)


def to_bf16(codes: Tensor, scales: Tensor, global_scale: float) -> Tensor:
    """The values, exact in BF16."""
    if codes.device.type == "meta":
        return torch.empty(codes.shape[0], codes.shape[1] * 2, dtype=torch.bfloat16, device="meta")
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.bfloat16)
    table = torch.cat((magnitudes, -magnitudes)) * global_scale
    values = torch.stack((table[(codes & 15).int()], table[(codes >> 4).int()]), -1).view(
        len(codes), -1, 16
    )
    return (values * scales.bfloat16()[..., None]).flatten(1)

"""CloverLM checkpoints made here: BF16 as the authors' converter writes it, packed as its
--nvfp4 does, and the tiny vector.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.paths import VECTORS

PRODUCER = {"name": "cloverlm_converter", "version": "1.0"}
HF_QUANT_CONFIG = {
    "producer": PRODUCER,
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["emb", "linear"],
    },
}


@dataclass(frozen=True)
class CloverShape:
    """Sizes of a model; hidden is heads * head_dim and the MLP four times that, as in CloverLM."""

    blocks: int = 2
    heads: int = 8
    key_heads: int = 2
    head_dim: int = 64
    vocabulary: int = 512

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim

    def config(self, **more: Any) -> dict[str, Any]:
        """config.json with the converter's keys."""
        return {
            "model_type": "cloverlm",
            "architectures": ["CloverLMForCausalLM"],
            "vocab_size": self.vocabulary,
            "num_blocks": self.blocks,
            "num_hidden_layers": self.blocks,
            "heads": self.heads,
            "num_attention_heads": self.heads,
            "d_head": self.head_dim,
            "head_dim": self.head_dim,
            "ratio": self.heads // self.key_heads,
            "num_key_value_heads": self.key_heads,
            "hidden_size": self.hidden,
            "intermediate_size": 4 * self.hidden,
            "max_context": 1024,
            "max_position_embeddings": 1024,
            "scale_type": "1/sqrt(d)",
            "quartet_2_impl": "quartet2",
            "weight_tying": True,
            "tie_word_embeddings": True,
            "attn_backend": "pytorch",
            "dtype": "bfloat16",
            "auto_map": {
                "AutoConfig": "configuration_cloverlm.CloverLMConfig",
                "AutoModelForCausalLM": "modeling_cloverlm.CloverLMForCausalLM",
                "AutoTokenizer": ["tokenization_cloverlm.CloverLMTokenizer", None],
            },
        } | more

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every stored tensor."""
        d, keys = self.hidden, self.key_heads * self.head_dim
        found: dict[str, tuple[int, ...]] = {
            "transformer.emb.weight": (self.vocabulary, d),
            "transformer.linear.weight": (self.vocabulary, d),
        }
        for block in range(self.blocks):
            path = f"transformer.blocks.{block}"
            found |= {
                f"{path}.mhsa.scale": (1, self.heads, 1, 1),
                f"{path}.mhsa.lq.weight": (d, d),
                f"{path}.mhsa.lk.weight": (keys, d),
                f"{path}.mhsa.lv.weight": (keys, d),
                f"{path}.mhsa.lo.weight": (d, d),
                f"{path}.out_att_norm.weight": (d,),
                f"{path}.mlp.l1.0.weight": (4 * d, d),
                f"{path}.mlp.l2.weight": (d, 4 * d),
                f"{path}.out_mlp_norm.weight": (d,),
            }
        return found | {"transformer.out_norm.weight": (d,)}

    def tensors(self, seed: int = 0) -> dict[str, Tensor]:
        """Weights in BF16, large enough that each block changes the residual; the head is the
        embedding's double.
        """
        generator = torch.Generator().manual_seed(seed)
        found: dict[str, Tensor] = {}
        for name, size in self.sizes().items():
            values = torch.randn(size, generator=generator)
            if name.endswith("norm.weight"):
                values = (0.2 if "out_norm" in name else 1.0) * (1 + 0.1 * values)
            elif name.endswith(".scale"):
                values = math.sqrt(self.head_dim) + 2 * values
            elif ".blocks." in name:
                values = (
                    values * size[1] ** -0.5 * {"lk": 2.0, "lv": 0.7}.get(name.split(".")[-2], 1.0)
                )
            found[name] = values.bfloat16()
        return found | {"transformer.linear.weight": found["transformer.emb.weight"].clone()}


def is_product(name: str) -> bool:
    """Whether it is one of the six weights of a block that Quartet II quantizes."""
    return ".blocks." in name and name.endswith(
        (".lq.weight", ".lk.weight", ".lv.weight", ".lo.weight", ".l1.0.weight", ".l2.weight")
    )


def write_bf16(folder: Path, shape: CloverShape, **config: Any) -> Path:
    """The form without quantized tensors; returns the folder."""
    return write(folder, shape.config(**config), shape.tensors())


def write_packed(folder: Path, shape: CloverShape, tiled: bool = True, **config: Any) -> Path:
    """The form of --nvfp4: the same numbers, quantized. `tiled=False` is what a ModelOpt reader
    would expect.
    """
    from nibble_kernels.quartet2.quantize import quant_fp4

    tensors: dict[str, Tensor] = {}
    for name, tensor in shape.tensors().items():
        if not is_product(name):
            tensors[name] = tensor
            continue
        codes, scales, g = quant_fp4(tensor, four_over_six=True, tiled=tiled)
        tensors |= {
            name: codes.view(torch.float4_e2m1fn_x2),
            f"{name}_scale": scales,
            f"{name}_scale_2": g,
        }
    (folder := write(folder, shape.config(**config), tensors)).joinpath(
        "hf_quant_config.json"
    ).write_text(json.dumps(HF_QUANT_CONFIG))
    return folder


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


def tiny_vector() -> dict[str, Any]:
    return json.loads((VECTORS / "cloverlm_tiny_forward.json").read_text())


def tiny_tensors() -> dict[str, Tensor]:
    """The vector's weights, by its formula, float32."""
    found: dict[str, Tensor] = {}
    for t, (name, shape) in enumerate(tiny_vector()["tensors"]):
        n = torch.arange(math.prod(shape), dtype=torch.float64)
        w = torch.sin(0.7 * (t + 1) + 0.61803398875 * n + 0.05 * torch.sqrt(n + 1) * (t + 1))
        if name.endswith("norm.weight"):
            w = 1 + 0.1 * w
        elif name.endswith(".scale"):
            w = math.sqrt(tiny_vector()["config"]["d_head"]) * (1 + 0.1 * w)
        else:
            w = 0.3 * w
        found[name] = w.float().reshape(shape)
    return found


def write_tiny_with_wide_heads(folder: Path, head_dim: int = 32) -> Path:
    """The tiny vector with zeros after each head's 8 elements, because vLLM's attention on the CPU
    begins at 32.

    Pair j turns by base^(-2j/d); with d four times as large, the base to its fourth power gives the
    first pairs the same turn, and zeros change neither lengths nor products.
    """
    config = tiny_vector()["config"]
    heads, narrow = config["heads"], config["d_head"]
    wide: dict[str, Tensor] = {}
    for name, tensor in tiny_tensors().items():
        if name.endswith((".lq.weight", ".lk.weight", ".lv.weight")):
            rows = tensor.unflatten(0, (-1, narrow))
            tensor = torch.nn.functional.pad(rows, (0, 0, 0, head_dim - narrow)).flatten(0, 1)
        elif name.endswith(".lo.weight"):
            columns = tensor.unflatten(1, (-1, narrow))
            tensor = torch.nn.functional.pad(columns, (0, head_dim - narrow)).flatten(1)
        wide[name] = tensor
    shape = CloverShape(
        config["num_blocks"], heads, heads // config["ratio"], head_dim, config["vocab_size"]
    )
    hidden = heads * narrow
    more = {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "rope_base": 1024.0 ** (head_dim // narrow),
    }
    return write(folder, shape.config(dtype="float32", **more), wide)

"""Small GGUF files: of tiny random models, with the names and permutations of llama.cpp's converter
by the library's own table of names, and of a small vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter

from tests.support.paths import ROOT

DATA = ROOT / "tests" / "unit" / "data" / "gguf"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def bytes_vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges whose merges cross words, digits and lines: each way to split shows."""
    data = json.loads((DATA / "bytes_vocabulary.json").read_text(encoding="utf-8"))
    return data["tokens"], data["merges"]


def scored_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types of a SentencePiece model."""
    data = json.loads((DATA / "scored_vocabulary.json").read_text(encoding="utf-8"))
    return data["tokens"], data["scores"], data["types"]


def add_tokenizer(writer: GGUFWriter, pre: str | None, template: str | None = TEMPLATE) -> int:
    """Write a byte-level tokenizer that splits by `pre`, or SentencePiece for None; returns its
    size.
    """
    if pre is None:
        tokens, scores, types = scored_vocabulary()
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(scores)
        roles = {"bos": 1, "eos": 2, "unk": 0}
    else:
        tokens, merges = bytes_vocabulary()
        types = [3 if token in SPECIAL else 1 for token in tokens]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(merges)
        roles = {"bos": 1, "eos": 2, "pad": 0}
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for role, number in roles.items():
        getattr(writer, f"add_{role}_token_id")(number)
    if template:
        writer.add_chat_template(template)
    return len(tokens)


def write_gguf(
    path: Path,
    architecture: str,
    numbers: Mapping[str, Any],
    tensors: Mapping[str, numpy.ndarray],
    kind: Type = Type.F32,
    pre: str | None = "smollm",
    general: Mapping[str, Any] | None = None,
    template: str | None = TEMPLATE,
) -> Path:
    """A GGUF file with `numbers` under the architecture's prefix; matrices are stored as `kind`."""
    writer = GGUFWriter(path, architecture)
    for key, value in (general or {}).items():
        add_number(writer, key, value)
    for key, value in numbers.items():
        add_number(writer, f"{architecture}.{key}", value)
    add_tokenizer(writer, pre, template)
    for name, values in tensors.items():
        one = kind if values.ndim > 1 and kind != Type.F32 else Type.F32
        writer.add_tensor(name, gguf.quants.quantize(values, one), raw_dtype=one)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_number(writer: GGUFWriter, key: str, value: Any) -> None:
    kinds = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    kinds[type(value)](key, value)


def model_tensors(model: Any, architecture: str) -> dict[str, numpy.ndarray]:
    """The weights of a transformers model, named and arranged as llama.cpp's converter does."""
    config = model.config
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    found: dict[str, numpy.ndarray] = {}
    tied = config.tie_word_embeddings
    for name, weight in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        for one, values in _unstacked(name, weight.float()):
            gguf_name = names.get_name(one, try_suffixes=(".weight", ".bias"))
            assert gguf_name is not None, one
            found[gguf_name] = _arranged(one, values, config, architecture).numpy()
    return found


def _unstacked(name: str, weight: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """transformers stacks gate and up of all experts in one tensor; llama.cpp has two."""
    if name.endswith("experts.gate_up_proj"):
        half = weight.shape[1] // 2
        prefix = name.removesuffix("gate_up_proj")
        if "mlp" not in name:  # pragma: no cover
            raise AssertionError(name)
        return [
            (f"{prefix}gate_proj.weight", weight[:, :half].contiguous()),
            (f"{prefix}up_proj.weight", weight[:, half:].contiguous()),
        ]
    if name.endswith("experts.down_proj"):
        return [(f"{name}.weight", weight)]
    return [(name, weight)]


def _arranged(name: str, values: torch.Tensor, config: Any, architecture: str) -> torch.Tensor:
    heads = {
        "q_proj": config.num_attention_heads,
        "k_proj": config.num_key_value_heads,
    }.get(name.split(".")[-2])
    if architecture == "llama" and heads:
        shape = values.shape
        pairs = values.view(heads, 2, shape[0] // heads // 2, -1).transpose(1, 2)
        values = pairs.reshape(shape).contiguous()
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        values = values + 1
    if name.endswith("shared_expert_gate.weight"):
        values = values.view(-1)
    return values

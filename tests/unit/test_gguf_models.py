"""Models from GGUF: values of each type, and families against transformers' own models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from nibble_kernels.weight_quant import Nvfp4Weight, dequantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from nibble.checkpoint import read_checkpoint
from nibble.checkpoint.convert import convert
from nibble.checkpoint.convert.gguf import gguf_model
from nibble.checkpoint.gguf.tensors import Stored, bf16
from tests.support.models.gguf_models import DATA, bytes_vocabulary, model_tensors, write_gguf

BLOCKS: dict[str, dict[str, str]] = json.loads((DATA / "llama_cpp_blocks.json").read_text())
VOCABULARY = len(bytes_vocabulary()[0])
H, WIDE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 32
SIZES: dict[str, Any] = {
    "hidden_size": H,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
NUMBERS: dict[str, Any] = {
    "block_count": LAYERS,
    "context_length": 512,
    "embedding_length": H,
    "feed_forward_length": WIDE,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": HEAD_DIM,
    "rope.freq_base": 10000.0,
}
# Tokenizers by architecture, None for SentencePiece
PRE = {
    "qwen2": "qwen2",
    "qwen3": "qwen2",
    "qwen2moe": "qwen2",
    "qwen3moe": "qwen2",
    "gemma2": None,
    "gemma3": None,
}
EXPERTS = {"expert_count": 4, "expert_used_count": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA3 = {
    "sliding_window": 8,
    "query_pre_attn_scalar": HEAD_DIM,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "layer_types": ["sliding_attention", "full_attention"],
}
GEMMA3_NUMBERS = {
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": 2,
    "rope.freq_base": 1000000.0,
    "rope.scaling.type": "linear",
    "rope.scaling.factor": 8.0,
}
# name -> transformers' class of config, what it adds, GGUF's architecture, what that adds
FAMILIES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}, "llama", {"vocab_size": VOCABULARY}),
    "llama, tied": ("LlamaConfig", {"tie_word_embeddings": True}, "llama", {}),
    "llama, biases": ("LlamaConfig", {"attention_bias": True}, "llama", {}),
    "llama 3.1": ("LlamaConfig", {"rope_parameters": LLAMA3}, "llama", {}),
    "mistral": (
        "MistralConfig",
        {"sliding_window": 8},
        "llama",
        {"attention.sliding_window": 8},
    ),
    "mixtral": (
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        "llama",
        {**EXPERTS, "rope.freq_base": 1000000.0},
    ),
    "qwen2": ("Qwen2Config", {}, "qwen2", {}),
    "qwen2, yarn": (
        "Qwen2Config",
        {"rope_parameters": YARN},
        "qwen2",
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128,
        },
    ),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}, "qwen3", {}),
    "qwen2moe": (
        "Qwen2MoeConfig",
        {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 64},
        "qwen2moe",
        {
            **EXPERTS,
            "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 64,
        },
    ),
    "qwen3moe": (
        "Qwen3MoeConfig",
        {**MOE, "num_experts": 4, "norm_topk_prob": True},
        "qwen3moe",
        {**EXPERTS, "expert_feed_forward_length": 32},
    ),
    "gemma2": (
        "Gemma2Config",
        {"sliding_window": 8, "query_pre_attn_scalar": HEAD_DIM, "tie_word_embeddings": True},
        "gemma2",
        {
            "attention.sliding_window": 8,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {**GEMMA3, "tie_word_embeddings": True},
        "gemma3",
        GEMMA3_NUMBERS,
    ),
}


def tiny(name: str) -> Any:
    """A model of a family with random weights that BF16 holds; norms and biases too."""
    config_class, more, _, _ = FAMILIES[name]
    config = getattr(transformers, config_class)(**{**SIZES, **more})
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.ndim == 1 else 0.15
            parameter.add_(torch.randn_like(parameter) * spread)
            parameter.copy_(parameter.bfloat16().float())
    return model


def write_model(path: Path, name: str, model: Any, kind: Type = Type.F32) -> Path:
    _, _, architecture, more = FAMILIES[name]
    tensors = model_tensors(model, architecture)
    if name == "llama 3.1":
        inverse = 10000.0 ** (-numpy.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        tensors["rope_freqs.weight"] = (inverse / model.model.rotary_emb.inv_freq.numpy()).astype(
            numpy.float32
        )
    pre = PRE.get(architecture, "llama-bpe" if name == "llama 3.1" else "smollm")
    if name in ("mistral", "mixtral"):
        pre = None
    return write_gguf(path, architecture, {**NUMBERS, **more}, tensors, kind, pre)


def as_bf16(path: Path, folder: Path) -> Any:
    """The model that nibble reads from a GGUF file, loaded by transformers."""
    folder.mkdir()
    with gguf_model(path, "nvfp4").bf16_folder(folder) as written:
        return AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32).eval()


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(48).view(2, 24) * 7 % VOCABULARY  # longer than the sliding window
    with torch.inference_mode():
        return model(ids).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_original(name: str, tmp_path: Path) -> None:
    original = tiny(name)
    read = as_bf16(write_model(tmp_path / "m.gguf", name, original), tmp_path / "bf16")
    assert type(read) is type(original)
    expected, found = logits(original), logits(read)
    assert expected.std() > 0.1  # so that a permuted head or a wrong norm shows
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q8_0, Type.Q5_1, Type.Q4_0])
def test_logits_of_stored_types(kind: Type, tmp_path: Path) -> None:
    original = tiny("llama")
    read = as_bf16(write_model(tmp_path / "m.gguf", "llama", original, kind), tmp_path / "bf16")
    expected, found = logits(original), logits(read)
    error = float((found - expected).pow(2).mean().sqrt() / expected.std())
    assert error < {Type.F16: 1e-3, Type.BF16: 1e-5, Type.Q8_0: 0.03}.get(kind, 0.5)


class Blocks:
    """A tensor as the library's reader gives it."""

    def __init__(self, kind: str) -> None:
        data = numpy.frombuffer(bytes.fromhex(BLOCKS[kind]["blocks"]), numpy.uint8)
        self.data = data.reshape(2, -1)
        self.shape = numpy.array([256, 2])
        self.tensor_type = Type[kind]


@pytest.mark.parametrize("kind", BLOCKS)
def test_values_are_those_of_llama_cpp(kind: str) -> None:
    """Blocks of llama.cpp's quantizer against its own dequantizer (libggml of llama-cpp-python
    0.3.36), rounded once to BF16.
    """
    expected = numpy.frombuffer(bytes.fromhex(BLOCKS[kind]["float32"]), numpy.float32)
    found = torch.frombuffer(bf16(Stored(Blocks(kind)), 0, 2 * len(expected)), dtype=torch.bfloat16)
    assert torch.equal(found, torch.from_numpy(expected.copy()).bfloat16())


@pytest.mark.parametrize("name", ["llama, tied", "mixtral", "qwen2moe", "gemma3"])
def test_nvfp4_is_that_of_the_bf16_model(name: str, tmp_path: Path) -> None:
    """The same bytes as by way of a BF16 folder."""
    path = write_model(tmp_path / "m.gguf", name, tiny(name), Type.Q8_0)
    direct = convert(str(path), tmp_path / "direct", "nvfp4").dest
    (tmp_path / "scratch").mkdir()
    with gguf_model(path, "nvfp4").bf16_folder(tmp_path / "scratch") as folder:
        by_folder = convert(str(folder), tmp_path / "by-folder", "nvfp4").dest
        unquantized = load_file(folder / "model.safetensors")
    assert sorted(one.name for one in direct.iterdir()) == sorted(
        one.name for one in by_folder.iterdir()
    )
    for file in direct.iterdir():
        assert file.read_bytes() == (by_folder / file.name).read_bytes(), file.name
    found = read_checkpoint(str(direct))
    assert found.scheme.name == "W4A16_NVFP4" and not found.problems and not found.missing
    stored = load_file(direct / "model.safetensors")
    module = next(name for name in stored if name.endswith("weight_scale")).removesuffix("_scale")
    weight = Nvfp4Weight(stored[module], stored[f"{module}_scale"], stored[f"{module}_scale_2"])
    error = (dequantize(weight).float() - unquantized[module].float()).norm()
    assert error / unquantized[module].float().norm() < 0.12


def test_experts_are_read_one_by_one(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "qwen3moe", tiny("qwen3moe"), Type.Q8_0)
    names = set(gguf_model(path, "nvfp4").found.tensors)
    assert {f"model.layers.1.mlp.experts.{e}.up_proj.weight" for e in range(4)} <= names
    assert not any("exps" in name for name in names)


def test_w4a4_from_gguf(tmp_path: Path) -> None:
    from nibble.checkpoint.convert import Wishes

    path = write_model(tmp_path / "m.gguf", "llama", tiny("llama"), Type.Q8_0)
    texts = ("The capital of France is Paris.", "def f(x):\n    return x")
    done = convert(str(path), tmp_path / "w4a4", "nvfp4", Wishes("fp4", texts=texts))
    found = read_checkpoint(str(done.dest))
    assert found.scheme.name == "NVFP4" and not found.problems
    assert not [one for one in done.dest.iterdir() if one.is_dir()]  # no BF16 left

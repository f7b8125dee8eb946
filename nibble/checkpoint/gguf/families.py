"""Which Hugging Face model a GGUF model is: names of tensors and the numbers of config.json.

Every key and tensor of the file must have a place here. One that does not is refused by name,
because a number that is dropped changes what the model answers. transformers' own tables (5.19)
drop what they do not know: RoPE factors, soft caps, sizes of experts, dimensions of heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nibble.checkpoint.gguf.file import GgufFile
from nibble.checkpoint.gguf.keys import Keys, head_dim
from nibble.checkpoint.gguf.rope import rope_scaling
from nibble.errors import ExitCode, NibbleError

Config = dict[str, Any]

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
OUTSIDE_LAYERS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
MAX_LAYERS = 4096
SOFTMAX = 1  # gguf.ExpertGatingFuncType

# Keys that say nothing about the computation, or repeat what a tensor's shape says.
_SILENT = {"vocab_size", "rope.scaling.finetuned", "rope.scaling.original_context_length"}
_COMMON = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
_WINDOW = "attention.sliding_window"


@dataclass(frozen=True)
class Family:
    """A class of Hugging Face: its name, its tensors, and its part of config.json.

    `interleaved`: rows of q and k have their RoPE pairs side by side, as llama.cpp has them for
    this family. `norm_offset`: what llama.cpp adds to the weights of norms. `biases`: which of
    `layer` have one.
    """

    model_type: str
    architecture: str
    layer: Mapping[str, str]
    extra: Callable[[Keys], Config] = lambda _: {}
    keys: frozenset[str] = field(default_factory=frozenset)
    biases: tuple[str, ...] = ()
    interleaved: bool = False
    norm_offset: float = 0.0


def _llama(keys: Keys) -> Config:
    found: Config = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    biased = [name for name in ("attn_q", "attn_k", "attn_v", "attn_output")
              if f"blk.0.{name}.bias" in keys.file.tensors]  # fmt: skip
    if biased and len(biased) < 4:
        raise keys.refused("block_count", f"only {', '.join(biased)} have biases")
    found["attention_bias"] = bool(biased)
    if window := keys.get(_WINDOW):
        found["sliding_window"] = window
    return found


def _mixtral(keys: Keys) -> Config:
    return {
        "hidden_act": "silu",
        "num_local_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "sliding_window": keys.get(_WINDOW) or None,
    }


def _qwen(_: Keys) -> Config:
    return {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False}


def _qwen2(_: Keys) -> Config:
    return {"hidden_act": "silu", "use_sliding_window": False}


def _qwen_experts(keys: Keys) -> Config:
    count, size, _ = keys.shape("blk.0.ffn_gate_exps.weight", 3)
    if count != keys.number("expert_count"):
        raise keys.refused("expert_count", f"blk.0.ffn_gate_exps.weight has {count} experts")
    return {
        "hidden_act": "silu",
        "use_sliding_window": False,
        "num_experts": count,
        "num_experts_per_tok": keys.number("expert_used_count"),
        "moe_intermediate_size": size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2_experts(keys: Keys) -> Config:
    shared, _ = keys.shape("blk.0.ffn_gate_shexp.weight")
    # llama.cpp does not normalize the weights of qwen2moe's chosen experts (models/qwen2moe.cpp)
    return {
        **_qwen_experts(keys),
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": False,
    }


def _qwen3_experts(keys: Keys) -> Config:
    return {**_qwen_experts(keys), "attention_bias": False, "norm_topk_prob": True}


def _gemma(keys: Keys, large_layers: int) -> Config:
    """Queries are scaled by the dimension of a head, in the largest model by hidden size / heads
    (llama.cpp, models/gemma2.cpp and gemma3.cpp, which know it by its number of layers).
    """
    heads = keys.number("attention.head_count")
    large = keys.number("block_count") == large_layers
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": keys.number("embedding_length") // heads
        if large
        else head_dim(keys),
        "sliding_window": keys.number(_WINDOW),
    }


def _gemma2(keys: Keys) -> Config:
    return {
        **_gemma(keys, 46),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Keys) -> Config:
    pattern = keys.number("attention.sliding_window_pattern", 6)
    return {
        **_gemma(keys, 62),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
        "sliding_window_pattern": pattern,
        "layer_types": [
            "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention"
            for layer in range(keys.number("block_count"))
        ],
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
    }


_MOE_KEYS = frozenset(
    {
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
        "expert_shared_feed_forward_length",
        "expert_gating_func",
    }
)
_QKV = ("attn_q", "attn_k", "attn_v")
_CAPS = frozenset({_WINDOW, "attn_logit_softcapping", "final_logit_softcapping"})
_LLAMA_KEYS = frozenset({_WINDOW, "expert_count", "expert_used_count"})
# Mixtral is llama with experts in GGUF.
_MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    _LAYER | _MIXTRAL_EXPERTS,
    _mixtral,
    _LLAMA_KEYS | _MOE_KEYS,
    interleaved=True,
)
FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "llama",
        "LlamaForCausalLM",
        _LAYER | _MLP,
        _llama,
        _LLAMA_KEYS,
        interleaved=True,
    ),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", _LAYER | _MLP, _qwen2, biases=_QKV),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", _LAYER | _QK_NORMS | _MLP, _qwen),
    "qwen2moe": Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        _LAYER | _EXPERTS | _SHARED_EXPERT,
        _qwen2_experts,
        _MOE_KEYS,
        biases=_QKV,
    ),
    "qwen3moe": Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", _LAYER | _QK_NORMS | _EXPERTS, _qwen3_experts, _MOE_KEYS
    ),
    "gemma2": Family(
        "gemma2",
        "Gemma2ForCausalLM",
        _LAYER | _GEMMA_NORMS | _MLP,
        _gemma2,
        _CAPS,
        norm_offset=1.0,
    ),
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _LAYER | _GEMMA_NORMS | _QK_NORMS | _MLP,
        _gemma3,
        _CAPS | {"attention.sliding_window_pattern", "rope.freq_base_swa"},
        norm_offset=1.0,
    ),
}


def family_of(file: GgufFile) -> Family:
    """The family of a file. Raises CONFIG for one that nibble does not know."""
    name = file.architecture
    if name == "llama" and file.metadata.get("llama.expert_count"):
        return _MIXTRAL
    if name not in FAMILIES:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{file.path} has the architecture {name!r}",
            expected=f"one of {', '.join(FAMILIES)}",
            action="download this model from Hugging Face in its original format and convert that",
        )
    return FAMILIES[name]


def missing_tensors(file: GgufFile, family: Family) -> list[str]:
    """The tensors that the family has and the file lacks; a head may be the embedding's."""
    names = [f"{part}.weight" for part in family.layer] + [f"{part}.bias" for part in family.biases]
    count = Keys(file).number("block_count")
    if count > MAX_LAYERS:
        raise NibbleError(
            ExitCode.MODEL,
            what=f"{file.path} has {count} layers",
            expected=f"at most {MAX_LAYERS}",
            action="download the file again",
        )
    layers = range(count)
    needed = ["token_embd.weight", "output_norm.weight"]
    needed += [f"blk.{layer}.{name}" for layer in layers for name in names]
    return [name for name in needed if name not in file.tensors]


def config_of(file: GgufFile, family: Family) -> Config:
    """config.json of the model. Raises CONFIG for what it cannot state, MODEL for what the file
    lacks.
    """
    keys = Keys(file)
    _check_keys(keys, family)
    heads, tied = keys.number("attention.head_count"), "output.weight" not in file.tensors
    vocabulary, hidden = keys.shape("token_embd.weight")
    if hidden != keys.number("embedding_length"):
        raise keys.refused("embedding_length", f"token_embd.weight has {hidden} columns")
    sliding = family.model_type == "llama" and keys.get(_WINDOW)
    config: Config = {
        "architectures": ["MistralForCausalLM" if sliding else family.architecture],
        "model_type": "mistral" if sliding else family.model_type,
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "num_hidden_layers": keys.number("block_count"),
        "intermediate_size": keys.number("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.number("attention.head_count_kv", heads),
        "head_dim": head_dim(keys),
        "rms_norm_eps": _short(keys.number("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": keys.number("context_length"),
        "rope_theta": _short(keys.number("rope.freq_base", 10000.0)),
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "use_cache": True,
    }
    if scaling := rope_scaling(keys):
        config["rope_scaling"] = scaling
    return config | family.extra(keys)


def _check_keys(keys: Keys, family: Family) -> None:
    known = _COMMON | _SILENT | family.keys
    for key in keys.file.metadata:
        name = key.removeprefix(keys.prefix)
        if key.startswith(keys.prefix) and name not in known and keys.get(name) not in (0, False):
            raise keys.refused(name, f"nibble does not know what {key} means for this family")
    if keys.get("attention.value_length") not in (None, head_dim(keys)):
        raise keys.refused("attention.value_length", "keys and values differ in size")
    if keys.get("expert_gating_func") not in (None, SOFTMAX):
        raise keys.refused("expert_gating_func", "its router does not use a softmax")
    if keys.get("rope.dimension_count") not in (None, head_dim(keys)):
        raise keys.refused("rope.dimension_count", "RoPE rotates a part of each head")


def _short(value: float) -> float:
    """A float32 as the shortest decimal that is the same float32: 1e-05, not 9.999999747e-06."""
    import numpy

    return float(str(numpy.float32(value)))

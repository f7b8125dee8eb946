"""Which layers of a model keep memory per sequence, and how much of it: from config.json alone.

A family is listed here only after its layers were compared with vLLM 0.32's own KV cache specs
(tests/e2e/test_kv_matches_vllm.py). For any other the answer is None: unknown, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Config = Mapping[str, Any]
Kind = Literal["full", "sliding", "mla", "state", "shared", "none"]
NESTED = ("text_config", "llm_config", "language_config", "thinker_config")


@dataclass(frozen=True)
class State:
    """Recurrent state of a Mamba, Mamba2, gated delta net or short convolution layer: constant per
    sequence.

    `conv_channels` + 2 * `group_size` * groups channels of `conv_rows` in the model's type, and
    `temporal_elements` of `temporal_bytes` each (None: the model's type). All are divided by tensor
    parallelism; groups that do not divide are replicated up to one a rank.
    """

    flavor: Literal["mamba1", "mamba2", "gdn", "short_conv"]
    conv_channels: int
    conv_rows: int
    temporal_elements: int = 0
    temporal_bytes: int | None = None
    groups: int = 0
    group_size: int = 0
    grows_with_speculation: bool = True


@dataclass(frozen=True)
class LayerMemory:
    """What one layer keeps for a sequence.

    `num_kv_heads` and `head_dim`s (K, V) are of the whole model; MLA keeps one vector of `head_dim`
    = latent + rope a token and no V. `window` in tokens for "sliding"; `shares_with` is the layer
    whose cache a "shared" one reads. Draft (MTP) layers count only with speculative decoding.
    """

    index: int
    kind: Kind
    num_kv_heads: int = 0
    head_dim: int = 0
    head_dim_v: int = 0
    window: int | None = None
    shares_with: int | None = None
    state: State | None = None
    is_draft: bool = False


Layers = tuple[LayerMemory, ...]


def text_config(config: Config) -> Config:
    """The part of config.json that describes the language model."""
    for key in NESTED:
        nested = config.get(key)
        if isinstance(nested, Mapping) and nested:
            return text_config(nested)
    return config


def layers(config: Config) -> Layers | None:
    """Every layer of the language model, then its draft layers; None where the architecture is
    not known here.
    """
    text = text_config(config)
    model_type = str(text.get("model_type") or config.get("model_type") or "")
    family = FAMILIES.get(model_type)
    if family is None:
        return None
    try:
        return tuple(family({**text, "model_type": model_type}))
    except (KeyError, TypeError, ValueError, ZeroDivisionError, IndexError):
        return None  # a config without the keys its family needs


def head_dim(text: Config) -> int:
    """Dimensions of a head, stated or hidden size over heads."""
    return int(
        text.get("head_dim")
        or DEFAULT_HEAD_DIM.get(text["model_type"])
        or text["hidden_size"] // text["num_attention_heads"]
    )


def kv_heads(text: Config) -> int:
    """Heads of K and V: stated, or transformers' default where config.json does not name them;
    null is all heads.
    """
    default = 0 if "num_key_value_heads" in text else DEFAULT_KV_HEADS.get(text["model_type"])
    return int(text.get("num_key_value_heads") or default or text["num_attention_heads"])


def _count(text: Config) -> int:
    return int(text["num_hidden_layers"])


# Transformers leaves a value out of a nested config where it equals the class's default.
DEFAULT_HEAD_DIM = {
    "gemma": 256,
    "gemma2": 256,
    "gemma3_text": 256,
    "gemma3n_text": 256,
    "gemma4_text": 256,
    "gemma4_unified_text": 256,
    "qwen3": 128,
    "qwen3_vl_text": 128,
    "qwen3_next": 256,
    "qwen3_5_text": 256,
    "qwen3_5_moe_text": 256,
    "gpt_oss": 64,
    "ministral3": 128,
    "glm4": 128,
    "seed_oss": 128,
    "ernie4_5": 128,
    "minimax_m2": 128,
    "afmoe": 128,
    "laguna": 128,
    "hy_v3": 128,
    "step3p5": 128,
    "muse_glimmer_text": 128,
    "nemotron_h": 128,
}
# Of families whose default is a number; in all others it is num_attention_heads.
DEFAULT_KV_HEADS = {
    "mistral": 8,
    "ministral3": 8,
    "mixtral": 8,
    "seed_oss": 8,
    "gpt_oss": 8,
    "glm4_moe": 8,
    "qwen2": 32,
    "qwen3": 32,
    "exaone4": 32,
    "gemma": 16,
    "qwen2_moe": 16,
    "gemma2": 4,
    "gemma3_text": 4,
    "gemma4_text": 4,
    "gemma4_unified_text": 4,
    "gemma3n_text": 2,
    "smollm3": 4,
    "qwen3_moe": 4,
    "glm4": 2,
    "ernie4_5": 2,
    "starcoder2": 2,
    "qwen2_vl_text": 8,
    "qwen2_5_vl_text": 8,
    "qwen3_vl_text": 32,
    "qwen3_vl_moe_text": 16,
    "minimax_m2": 8,
    "laguna": 8,
    "hy_v3": 8,
    "qwen3_next": 2,
    "qwen3_5_text": 4,
    "qwen3_5_moe_text": 2,
    "step3p5": 8,
    "muse_glimmer_text": 2,
    "nemotron_h": 8,
    "jamba": 8,
    "lfm2": 8,
    "lfm2_moe": 8,
}


# --- attention, full and sliding ------------------------------------------------------------------


def _attention(text: Config) -> list[LayerMemory]:
    """Every layer keeps K and V, over all tokens or over a window."""
    heads, dim = kv_heads(text), head_dim(text)
    windows = _windows(text)
    found = [
        LayerMemory(i, "full" if window is None else "sliding", heads, dim, dim, window)
        for i, window in enumerate(windows)
    ]
    return found + _attention_drafts(text, len(found), heads, dim)


def _attention_drafts(text: Config, start: int, heads: int, dim: int) -> list[LayerMemory]:
    count = int(text.get("num_nextn_predict_layers") or text.get("mtp_num_hidden_layers") or 0)
    return [LayerMemory(start + i, "full", heads, dim, dim, is_draft=True) for i in range(count)]


def _windows(text: Config) -> list[int | None]:
    """Window of each layer, None for full attention."""
    count, window = _count(text), text.get("sliding_window")
    if not window or text.get("use_sliding_window") is False:
        return [None] * count
    pattern = ALTERNATION.get(text["model_type"])
    types = text.get("layer_types")
    if (
        text["model_type"] == "gpt_oss"
    ):  # vllm 0.32 gpt_oss.py:176 looks at the index, not at layer_types
        types = None
    if types is None and pattern is None:
        return [int(window)] * count
    if types is None:
        period = int(
            text.get("sliding_window_pattern")
            or text.get("_sliding_window_pattern")
            or pattern
            or 1
        )
        types = [
            "full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(count)
        ]
        if text["model_type"].startswith("gemma4"):
            types[-1] = "full_attention"
    extra = 1 if text["model_type"] == "cohere2" else 0  # vllm 0.32 commandr.py:244
    return [int(window) + extra if kind == "sliding_attention" else None for kind in types[:count]]


# Every how many layers one attends to all tokens, where config.json does not say (transformers 5
# configurations).
ALTERNATION = {
    "gemma2": 2,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "gemma4_text": 6,
    "gemma4_unified_text": 6,
    "cohere2": 4,
    "gpt_oss": 2,
    "exaone4": 4,
    "olmo3": 4,
}


def _step(text: Config) -> list[LayerMemory]:
    """Step 3.5 and 3.7: sliding layers have other KV heads (vllm 0.32 step3p5.py:413)."""
    types, window = text["layer_types"], text.get("sliding_window")
    count, other = _count(text), text.get("attention_other_setting") or {}
    found = []
    for index, kind in enumerate(types[:count]):
        chosen = other if other.get("attention_type") == kind else {}
        heads = int(chosen.get("num_attention_groups") or text["num_attention_groups"])
        dim = int(chosen.get("head_dim") or head_dim(text))
        span = int(window) if window and kind == "sliding_attention" else None
        found.append(LayerMemory(index, "sliding" if span else "full", heads, dim, dim, span))
    return found


def _muse(text: Config) -> list[LayerMemory]:
    """Muse Glimmer: a window where a layer has rotary positions (1), all tokens where it has
    none.
    """
    heads, dim, window = kv_heads(text), head_dim(text), int(text["sliding_window"])
    return [
        LayerMemory(i, "sliding" if rotary else "full", heads, dim, dim, window if rotary else None)
        for i, rotary in enumerate(text["no_rope_layers"][: _count(text)])
    ]


def _gemma_shared(text: Config) -> list[LayerMemory]:
    """Gemma 3n and 4: the last layers read the cache of the last unshared layer of their kind;
    Gemma 4's full layers have heads of another size and number (vllm 0.32 gemma4.py:403,
    gemma3n.py:355)."""
    is_gemma4 = text["model_type"].startswith("gemma4")
    found = _attention(text)
    if is_gemma4:
        found = [_gemma4_global(text, layer) if layer.kind == "full" else layer for layer in found]
    own = len(found) - int(text.get("num_kv_shared_layers") or 0)
    kinds = [layer.kind for layer in found]
    for index in range(own, len(found)):
        target = max(i for i in range(own) if kinds[i] == kinds[index])
        found[index] = replace(found[index], kind="shared", shares_with=target)
    return found


def _gemma4_global(text: Config, layer: LayerMemory) -> LayerMemory:
    dim = int(text.get("global_head_dim") or layer.head_dim)
    heads = layer.num_kv_heads
    if text.get("attention_k_eq_v") and text.get("num_global_key_value_heads"):
        heads = int(text["num_global_key_value_heads"])
    return replace(layer, num_kv_heads=heads, head_dim=dim, head_dim_v=dim)


# --- latent attention -----------------------------------------------------------------------------


def _latent(text: Config) -> list[LayerMemory]:
    """MLA: one latent vector and one rotary key a token, the same on every GPU."""
    dim = int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"])
    count, drafts = _count(text), int(text.get("num_nextn_predict_layers") or 0)
    return [LayerMemory(i, "mla", 1, dim, 0, is_draft=i >= count) for i in range(count + drafts)]


# --- recurrent state beside attention -------------------------------------------------------------


def _delta_net(text: Config) -> list[LayerMemory]:
    """Qwen3-Next, 3.5, 3.6: gated delta net, with full attention every few layers."""
    count = _count(text)
    period = int(text.get("full_attention_interval") or 4)
    types = text.get("layer_types") or [
        "full_attention" if (i + 1) % period == 0 else "linear_attention" for i in range(count)
    ]
    keys, values = int(text["linear_num_key_heads"]), int(text["linear_num_value_heads"])
    key_dim, value_dim = int(text["linear_key_head_dim"]), int(text["linear_value_head_dim"])
    state = State(
        "gdn",
        conv_channels=2 * keys * key_dim + values * value_dim,
        conv_rows=int(text["linear_conv_kernel_dim"]) - 1,
        temporal_elements=values * key_dim * value_dim,
        temporal_bytes=(
            TYPE_BYTES.get(str(text.get("mamba_ssm_dtype")))
            if "qwen3_5" in text["model_type"]
            else None
        ),
    )
    heads, dim = kv_heads(text), head_dim(text)
    found = [_state_or_attention(i, kind, state, heads, dim) for i, kind in enumerate(types)]
    return found + _attention_drafts(text, count, heads, dim)


TYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def _state_or_attention(index: int, kind: str, state: State, heads: int, dim: int) -> LayerMemory:
    if kind in ("full_attention", "attention"):
        return LayerMemory(index, "full", heads, dim, dim)
    return LayerMemory(index, "state", state=state)


NEMOTRON_KINDS = {"*": "attention", "M": "mamba", "-": "none", "E": "none"}


def _nemotron_h(text: Config) -> list[LayerMemory]:
    """Nemotron-H: Mamba2, attention, MLP and expert layers by a pattern of letters or names."""
    names = _nemotron_names(text, "layers_block_type", "hybrid_override_pattern")
    drafts = []
    if text.get("num_nextn_predict_layers"):
        drafts = _nemotron_names(text, "mtp_layers_block_type", "mtp_hybrid_override_pattern") or [
            "attention",
            "none",
        ]
        drafts = drafts * int(text["num_nextn_predict_layers"])
    heads_m, dim_m, size = (
        int(text["mamba_num_heads"]),
        int(text["mamba_head_dim"]),
        int(text["ssm_state_size"]),
    )
    state = State(
        "mamba2",
        conv_channels=heads_m * dim_m,
        conv_rows=int(text.get("conv_kernel") or 4) - 1,
        temporal_elements=heads_m * dim_m * size,
        # vllm 0.32 config.py:713: float32 where config.json does not say.
        temporal_bytes=TYPE_BYTES[str(text.get("mamba_ssm_cache_dtype") or "float32")],
        groups=int(text["n_groups"]),
        group_size=size,
    )
    heads, dim = kv_heads(text), int(text.get("attention_head_dim") or head_dim(text))
    found = []
    for index, name in enumerate([*names, *drafts]):
        layer = (
            _state_or_attention(index, name, state, heads, dim)
            if name in ("attention", "mamba")
            else LayerMemory(index, "none")
        )
        found.append(replace(layer, is_draft=index >= len(names)))
    return found


def _nemotron_names(text: Config, names_key: str, letters_key: str) -> list[str]:
    names = text.get(names_key)
    if names:
        known = {
            "mamba": "mamba",
            "linear_attention": "mamba",
            "attention": "attention",
            "full_attention": "attention",
        }
        return [known.get(str(name), "none") for name in names]
    return [NEMOTRON_KINDS[letter] for letter in str(text.get(letters_key) or "").replace("|", "")]


def _mamba1(text: Config) -> list[LayerMemory]:
    """Mamba and Falcon-Mamba: no attention at all."""
    inner = int(text["intermediate_size"])
    state = State(
        "mamba1",
        inner,
        int(text["conv_kernel"]) - 1,
        inner * int(text["state_size"]),
        grows_with_speculation=False,
    )
    return [LayerMemory(i, "state", state=state) for i in range(_count(text))]


def _mamba2(text: Config) -> list[LayerMemory]:
    inner = int(text.get("expand") or 2) * int(text["hidden_size"])
    heads, dim, size = int(text["num_heads"]), int(text["head_dim"]), int(text["state_size"])
    state = State(
        "mamba2",
        inner,
        int(text["conv_kernel"]) - 1,
        heads * dim * size,
        groups=int(text["n_groups"]),
        group_size=size,
    )
    return [LayerMemory(i, "state", state=state) for i in range(_count(text))]


def _jamba(text: Config) -> list[LayerMemory]:
    inner = int(text["mamba_expand"]) * int(text["hidden_size"])
    state = State(
        "mamba1",
        inner,
        int(text["mamba_d_conv"]) - 1,
        inner * int(text["mamba_d_state"]),
        grows_with_speculation=False,
    )
    period, offset = int(text["attn_layer_period"]), int(text["attn_layer_offset"])
    types = ["attention" if i % period == offset else "mamba" for i in range(_count(text))]
    return [
        _state_or_attention(i, kind, state, kv_heads(text), head_dim(text))
        for i, kind in enumerate(types)
    ]


def _granite_hybrid(text: Config) -> list[LayerMemory]:
    inner = int(text["mamba_expand"]) * int(text["hidden_size"])
    heads, dim, size = (
        int(text["mamba_n_heads"]),
        int(text["mamba_d_head"]),
        int(text["mamba_d_state"]),
    )
    state = State(
        "mamba2",
        inner,
        int(text["mamba_d_conv"]) - 1,
        heads * dim * size,
        groups=int(text["mamba_n_groups"]),
        group_size=size,
    )
    types = text.get("layer_types") or text["layers_block_type"]
    return [
        _state_or_attention(i, kind, state, kv_heads(text), head_dim(text))
        for i, kind in enumerate(types)
    ]


def _short_conv(text: Config) -> list[LayerMemory]:
    """LFM2: a short convolution in most layers, attention in the others."""
    width = int(text.get("conv_dim") or text["hidden_size"])
    state = State("short_conv", width, int(text["conv_L_cache"]) - 1, grows_with_speculation=False)
    types = text.get("layer_types") or [
        "full_attention" if i in text["full_attn_idxs"] else "conv" for i in range(_count(text))
    ]
    return [
        _state_or_attention(i, kind, state, kv_heads(text), head_dim(text))
        for i, kind in enumerate(types)
    ]


FAMILIES: Mapping[str, Callable[[Config], list[LayerMemory]]] = {
    **dict.fromkeys(
        (
            "llama",
            "mistral",
            "ministral3",
            "mixtral",
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_moe",
            "qwen2_vl",
            "qwen2_vl_text",
            "qwen2_5_vl",
            "qwen2_5_vl_text",
            "qwen3_vl_text",
            "qwen3_vl_moe_text",
            "phi3",
            "granite",
            "granitemoe",
            "glm4",
            "glm4_moe",
            "minimax_m2",
            "gemma",
            "gemma2",
            "gemma3_text",
            "gpt_oss",
            "afmoe",
            "laguna",
            "olmoe",
            "cohere2",
            "exaone4",
            "nemotron",
            "hy_v3",
            "seed_oss",
            "cloverlm",
        ),
        _attention,
    ),
    **dict.fromkeys(("gemma3n_text", "gemma4_text", "gemma4_unified_text"), _gemma_shared),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), _latent),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _delta_net
    ),
    **dict.fromkeys(("step3p5", "step3p7_text"), _step),
    **dict.fromkeys(("muse_glimmer", "muse_glimmer_text"), _muse),
    "nemotron_h": _nemotron_h,
    "mamba": _mamba1,
    "falcon_mamba": _mamba1,
    "mamba2": _mamba2,
    "jamba": _jamba,
    "granitemoehybrid": _granite_hybrid,
    **dict.fromkeys(("lfm2", "lfm2_moe"), _short_conv),
}

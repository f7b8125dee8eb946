"""Layers that keep a recurrent state, beside layers of attention: Mamba, delta net, convolution."""

from __future__ import annotations

from dataclasses import replace

from nibble.checkpoint.attention_layers import attention_drafts, layer_count
from nibble.checkpoint.heads import head_dim, kv_heads
from nibble.checkpoint.layer_memory import Config, LayerMemory, State

TYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
NEMOTRON_KINDS = {"*": "attention", "M": "mamba", "-": "none", "E": "none"}


def delta_net(text: Config) -> list[LayerMemory]:
    """Qwen3-Next, 3.5, 3.6: gated delta net, with full attention every few layers."""
    count = layer_count(text)
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
    return found + attention_drafts(text, count, heads, dim)


def _state_or_attention(index: int, kind: str, state: State, heads: int, dim: int) -> LayerMemory:
    if kind in ("full_attention", "attention"):
        return LayerMemory(index, "full", heads, dim, dim)
    return LayerMemory(index, "state", state=state)


def nemotron_h(text: Config) -> list[LayerMemory]:
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


def mamba1(text: Config) -> list[LayerMemory]:
    """Mamba and Falcon-Mamba: a state in every layer, without attention."""
    inner = int(text["intermediate_size"])
    state = State(
        "mamba1",
        inner,
        int(text["conv_kernel"]) - 1,
        inner * int(text["state_size"]),
        grows_with_speculation=False,
    )
    return [LayerMemory(i, "state", state=state) for i in range(layer_count(text))]


def mamba2(text: Config) -> list[LayerMemory]:
    """Mamba2: a state in every layer, without attention."""
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
    return [LayerMemory(i, "state", state=state) for i in range(layer_count(text))]


def jamba(text: Config) -> list[LayerMemory]:
    """Jamba: Mamba, with attention every few layers."""
    inner = int(text["mamba_expand"]) * int(text["hidden_size"])
    state = State(
        "mamba1",
        inner,
        int(text["mamba_d_conv"]) - 1,
        inner * int(text["mamba_d_state"]),
        grows_with_speculation=False,
    )
    period, offset = int(text["attn_layer_period"]), int(text["attn_layer_offset"])
    types = ["attention" if i % period == offset else "mamba" for i in range(layer_count(text))]
    return [
        _state_or_attention(i, kind, state, kv_heads(text), head_dim(text))
        for i, kind in enumerate(types)
    ]


def granite_hybrid(text: Config) -> list[LayerMemory]:
    """Granite 4 hybrids: Mamba2 and attention, in the order of the config."""
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


def short_conv(text: Config) -> list[LayerMemory]:
    """LFM2: a short convolution in most layers, attention in the others."""
    width = int(text.get("conv_dim") or text["hidden_size"])
    state = State("short_conv", width, int(text["conv_L_cache"]) - 1, grows_with_speculation=False)
    types = text.get("layer_types") or [
        "full_attention" if i in text["full_attn_idxs"] else "conv"
        for i in range(layer_count(text))
    ]
    return [
        _state_or_attention(i, kind, state, kv_heads(text), head_dim(text))
        for i, kind in enumerate(types)
    ]

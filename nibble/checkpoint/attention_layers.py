"""Layers that keep keys and values: over all tokens, over a window, or as a latent vector."""

from __future__ import annotations

from dataclasses import replace

from nibble.checkpoint.heads import head_dim, kv_heads
from nibble.checkpoint.layer_memory import Config, LayerMemory


def layer_count(text: Config) -> int:
    """Layers of the language model, without draft layers."""
    return int(text["num_hidden_layers"])


def attention(text: Config) -> list[LayerMemory]:
    """Every layer keeps K and V, over all tokens or over a window."""
    heads, dim = kv_heads(text), head_dim(text)
    windows = _windows(text)
    found = [
        LayerMemory(i, "full" if window is None else "sliding", heads, dim, dim, window)
        for i, window in enumerate(windows)
    ]
    return found + attention_drafts(text, len(found), heads, dim)


def attention_drafts(text: Config, start: int, heads: int, dim: int) -> list[LayerMemory]:
    """Draft (MTP) layers with full attention, numbered from `start`."""
    count = int(text.get("num_nextn_predict_layers") or text.get("mtp_num_hidden_layers") or 0)
    return [LayerMemory(start + i, "full", heads, dim, dim, is_draft=True) for i in range(count)]


def _windows(text: Config) -> list[int | None]:
    """Window of each layer, None for full attention."""
    count, window = layer_count(text), text.get("sliding_window")
    if not window or text.get("use_sliding_window") is False:
        return [None] * count
    pattern = ALTERNATION.get(text["model_type"])
    types = text.get("layer_types")
    if text["model_type"] == "gpt_oss":
        types = None  # vllm 0.32 gpt_oss.py:176 looks at the index, not at layer_types
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


def step(text: Config) -> list[LayerMemory]:
    """Step 3.5 and 3.7: sliding layers have other KV heads (vllm 0.32 step3p5.py:413)."""
    types, window = text["layer_types"], text.get("sliding_window")
    count, other = layer_count(text), text.get("attention_other_setting") or {}
    found = []
    for index, kind in enumerate(types[:count]):
        chosen = other if other.get("attention_type") == kind else {}
        heads = int(chosen.get("num_attention_groups") or text["num_attention_groups"])
        dim = int(chosen.get("head_dim") or head_dim(text))
        span = int(window) if window and kind == "sliding_attention" else None
        found.append(LayerMemory(index, "sliding" if span else "full", heads, dim, dim, span))
    return found


def muse(text: Config) -> list[LayerMemory]:
    """Muse Glimmer: a window where a layer has rotary positions (1), all tokens where it has
    none.
    """
    heads, dim, window = kv_heads(text), head_dim(text), int(text["sliding_window"])
    return [
        LayerMemory(i, "sliding" if rotary else "full", heads, dim, dim, window if rotary else None)
        for i, rotary in enumerate(text["no_rope_layers"][: layer_count(text)])
    ]


def gemma_shared(text: Config) -> list[LayerMemory]:
    """Gemma 3n and 4: the last layers read the cache of the last unshared layer of their kind;
    Gemma 4's full layers have heads of another size and number (vllm 0.32 gemma4.py:403,
    gemma3n.py:355)."""
    is_gemma4 = text["model_type"].startswith("gemma4")
    found = attention(text)
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


def latent(text: Config) -> list[LayerMemory]:
    """MLA: one latent vector and one rotary key a token, the same on every GPU."""
    dim = int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"])
    count, drafts = layer_count(text), int(text.get("num_nextn_predict_layers") or 0)
    return [LayerMemory(i, "mla", 1, dim, 0, is_draft=i >= count) for i in range(count + drafts)]

"""Memory per sequence: the arithmetic that needs no vLLM (test_kv_matches_vllm.py compares the
rest with it).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nibble.checkpoint import (
    LayerMemory,
    layers,
    read_checkpoint,
    sequence_memory,
    sequence_memory_bytes,
)
from tests.support.models.tiny_checkpoint import write_checkpoint
from tests.support.models.tiny_model import DEEPSEEK_MLA, MODELOPT_NVFP4, QWEN3

FULL = LayerMemory(0, "full", num_kv_heads=8, head_dim=128, head_dim_v=128)
SLIDING = replace(FULL, kind="sliding", window=1024)
CLOVERLM = {
    "model_type": "cloverlm",
    "num_hidden_layers": 29,
    "num_attention_heads": 28,
    "num_key_value_heads": 7,
    "head_dim": 128,
    "hidden_size": 3584,
}


def test_a_full_layer_keeps_k_and_v_of_every_token_in_whole_blocks() -> None:
    assert sequence_memory((FULL,), 100).total_bytes == 112 * 2 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("stated", "heads"),
    [({}, 8), ({"num_key_value_heads": 4}, 4), ({"num_key_value_heads": None}, 16)],
)
def test_kv_heads_that_config_json_leaves_out_are_the_default_of_the_class(
    stated: dict[str, Any], heads: int
) -> None:
    """As transformers writes the text model of Mistral 3."""
    text = {
        "model_type": "mistral",
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "hidden_size": 64,
    } | stated
    found = layers({"model_type": "mistral3", "text_config": text})
    assert found and [layer.num_kv_heads for layer in found] == [heads, heads]


def test_a_window_bounds_a_sliding_layer() -> None:
    short, long = (
        sequence_memory((SLIDING,), 512).total_bytes,
        sequence_memory((SLIDING,), 100_000).total_bytes,
    )
    assert long == (1024 + 16) * 2 * 8 * 128 * 2  # one more block: a window may begin inside one
    assert short == (512 + 16) * 2 * 8 * 128 * 2
    assert (
        sequence_memory((SLIDING,), 100_000, in_flight_tokens=2049).total_bytes
        == (1024 + 2048 + 16) * 2 * 8 * 128 * 2
    )


@pytest.mark.parametrize(("gpus", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_kv_heads_are_divided_and_then_replicated(gpus: int, heads: int) -> None:
    assert (
        sequence_memory((FULL,), 16, tensor_parallel_size=gpus).total_bytes
        == 16 * 2 * heads * 128 * 2
    )


@pytest.mark.parametrize(
    ("dtype", "bytes_per_head_pair"),
    [
        ("auto", 512),
        ("bfloat16", 512),
        ("fp8", 256),
        ("fp8_e4m3", 256),
        ("nvfp4", 2 * (128 // 2 + 128 // 16)),  # vllm 0.32 torch_utils.py:556, for K and for V
        ("nvfp4_4over6", 2 * (128 // 2 + 128 // 16)),
        ("turboquant_k8v4", 128 + 64 + 4),
    ],
)
def test_bytes_of_each_cache_type(dtype: str, bytes_per_head_pair: int) -> None:
    many = tuple(replace(FULL, index=i) for i in range(6))
    found = sequence_memory(many, 16, dtype)
    boundary = 4 * 512 if dtype.startswith("turboquant") else 4 * bytes_per_head_pair
    assert found.total_bytes == 16 * 8 * (2 * bytes_per_head_pair + boundary)


def test_unknown_cache_type_is_an_error() -> None:
    with pytest.raises(ValueError, match="fp3"):
        sequence_memory((FULL,), 16, "fp3")


@pytest.mark.parametrize("gpus", [1, 4])
def test_a_latent_is_the_same_on_every_gpu(gpus: int) -> None:
    latent = LayerMemory(0, "mla", 1, 576, 0)
    assert sequence_memory((latent,), 16, tensor_parallel_size=gpus).total_bytes == 16 * 576 * 2
    assert sequence_memory((latent,), 16, "fp8_ds_mla", gpus).total_bytes == 16 * 656


def test_cloverlm_is_the_reference_figure_per_token() -> None:
    found = layers(CLOVERLM)
    assert found is not None
    assert sequence_memory(found, 1024).bytes_per_token == 103_936
    for ranks in (2, 4):  # 7 heads on each rank, none shared
        assert sequence_memory(found, 1024, tensor_parallel_size=ranks).bytes_per_token == 103_936


def test_draft_layers_count_only_with_speculation() -> None:
    found = layers(DEEPSEEK_MLA | {"num_nextn_predict_layers": 1})
    assert found is not None
    assert [layer.is_draft for layer in found] == [False, True]
    without, with_draft = (
        sequence_memory(found, 64),
        sequence_memory(found, 64, speculative_tokens=1),
    )
    assert with_draft.total_bytes == 2 * without.total_bytes
    assert with_draft.by_kind == {"mla": without.total_bytes, "draft": without.total_bytes}


def test_vision_tower_keeps_nothing() -> None:
    text = QWEN3 | {"model_type": "qwen3_vl_text"}
    assert layers(
        {"model_type": "qwen3_vl", "text_config": text, "vision_config": {"depth": 24}}
    ) == layers(QWEN3)


def test_shared_layers_keep_nothing_and_name_their_target() -> None:
    config = QWEN3 | {
        "model_type": "gemma4_text",
        "num_hidden_layers": 12,
        "sliding_window": 64,
        "num_kv_shared_layers": 4,
    }
    found = layers(config)
    assert found is not None
    assert [layer.kind for layer in found[8:]] == ["shared"] * 4
    assert [layer.shares_with for layer in found[8:]] == [7, 7, 7, 5]
    assert sequence_memory(found, 64) == sequence_memory(found[:8], 64)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "marmalade", "num_hidden_layers": 2},
        {"model_type": "deepseek_v4"},
        {"model_type": "qwen3"},
        {},
    ],
)
def test_unknown_or_incomplete_architecture_is_unknown(config: dict[str, Any]) -> None:
    assert layers(config) is None


def test_memory_of_an_unknown_architecture_is_none(tmp_path: Path) -> None:
    found = read_checkpoint(
        str(write_checkpoint(tmp_path / "m", config={"model_type": "marmalade"})), environ={}
    )
    assert sequence_memory_bytes(found, 100) is None


def test_auto_means_the_declared_cache_type(tmp_path: Path) -> None:
    quantization = MODELOPT_NVFP4 | {
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}
    }
    found = read_checkpoint(
        str(write_checkpoint(tmp_path / "m", config={"quantization_config": quantization})),
        environ={},
    )
    declared = sequence_memory_bytes(found, 64)
    assert declared is not None and declared == sequence_memory_bytes(found, 64, "fp8")
    assert sequence_memory_bytes(found, 64, "bfloat16") == 2 * declared

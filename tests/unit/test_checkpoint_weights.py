"""Bytes by kind, parameters and bytes a decode step reads, from headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import pytest

from nibble.checkpoint import Weights, read_checkpoint
from nibble.checkpoint.headers import TensorInfo
from nibble.checkpoint.weights import expert_counts, kind_of, measure
from tests.support.models.tiny_checkpoint import (
    LINEAR_PARAMETERS,
    Tensors,
    linear,
    tensors,
    write_checkpoint,
)
from tests.support.models.tiny_model import DTYPE_BITS, MODELOPT_NVFP4

EMBEDDING = 128 * 64
NORMS = 2 * 64


def infos(shapes: Mapping[str, tuple[str, Sequence[int]]]) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(name, dtype, tuple(shape), prod(shape) * DTYPE_BITS[dtype] // 8)
        for name, (dtype, shape) in shapes.items()
    }


def weigh(
    shapes: Tensors, experts: tuple[int, int] | None = None, layers: int = 1, tied: bool = False
) -> Weights:
    count, chosen = experts or (None, None)
    return measure(infos(shapes), num_layers=layers, num_experts=count, experts_per_token=chosen)


@pytest.mark.parametrize(
    "form", ["bf16", "nvfp4", "w4a16", "fp8", "ct", "ct_w4a4", "quartet2", "gptq", "awq"]
)
def test_packed_weights_count_one_by_one(form: str) -> None:
    assert weigh(tensors(form)).parameters == LINEAR_PARAMETERS + 2 * EMBEDDING + NORMS


def test_nvfp4_bytes_are_half_a_byte_and_a_sixteenth_for_scales() -> None:
    found = weigh(tensors("nvfp4"))
    assert found.bytes_by_kind["attention"] + found.bytes_by_kind["mlp"] == LINEAR_PARAMETERS // 2
    assert found.scale_bytes == found.bytes_by_kind["scales"] == LINEAR_PARAMETERS // 16 + 7 * 2 * 4
    assert found.total_bytes == sum(found.bytes_by_kind.values())


def test_decode_step_reads_everything_but_the_embedding() -> None:
    found = weigh(tensors("nvfp4"))
    assert found.decode_bytes_per_step == found.total_bytes - 2 * EMBEDDING
    assert found.active_parameters == found.parameters - EMBEDDING


def test_tied_embedding_is_read_as_the_output_head() -> None:
    shapes = tensors("bf16")
    del shapes["lm_head.weight"]
    found = weigh(shapes)
    assert found.decode_bytes_per_step == found.total_bytes


def moe(experts: int = 8) -> Tensors:
    found = tensors("bf16") | {
        "model.layers.0.mlp.gate.weight": ("BF16", [experts, 64]),
        "model.layers.0.mlp.shared_expert.up_proj.weight": ("BF16", [32, 64]),
    }
    for index in range(experts):
        found |= linear(f"model.layers.0.mlp.experts.{index}.up_proj", 32, 64, "nvfp4")
    return found


def test_decode_step_reads_the_chosen_experts_with_their_scales_and_the_shared_one() -> None:
    found, dense = weigh(moe(), (8, 2)), weigh(tensors("bf16"))
    expert = 32 * 64 // 2 + 32 * 64 // 16 + 8
    router, shared = 8 * 64 * 2, 32 * 64 * 2
    assert found.bytes_by_kind["router"] == router
    assert found.bytes_by_kind["shared_experts"] == shared
    assert (
        found.decode_bytes_per_step
        == (dense.decode_bytes_per_step or 0) + router + shared + 2 * expert
    )
    assert (
        found.active_parameters == (dense.active_parameters or 0) + 8 * 64 + 32 * 64 + 2 * 32 * 64
    )


def test_unknown_number_of_experts_leaves_the_decode_step_unknown() -> None:
    found = weigh(moe(), None)
    assert (found.decode_bytes_per_step, found.active_parameters) == (None, None)


def test_vision_and_draft_are_counted_and_not_read() -> None:
    plain = weigh(tensors("bf16"))
    extra: Tensors = {
        "visual.blocks.0.attn.qkv.weight": ("BF16", [64, 64]),
        "mtp.layers.0.mlp.up_proj.weight": ("BF16", [64, 64]),
        "model.layers.1.self_attn.q_proj.weight": (
            "BF16",
            [64, 64],
        ),  # DeepSeek's draft follows the last layer
    }
    found = weigh(tensors("bf16") | extra)
    assert (found.vision_bytes, found.draft_bytes) == (8192, 2 * 8192)
    assert found.decode_bytes_per_step == plain.decode_bytes_per_step
    assert found.total_bytes == plain.total_bytes + 3 * 8192


def test_gpu_share_keeps_norms_and_routers_on_each() -> None:
    found = weigh(moe(), (8, 2))
    replicated = found.bytes_by_kind["norm"] + found.bytes_by_kind["router"]
    assert found.bytes_per_gpu(1) == found.total_bytes
    assert found.bytes_per_gpu(2) == replicated + (found.total_bytes - replicated) // 2


KIND_NAMES = {
    "attention": (
        "model.layers.3.self_attn.q_proj.weight",
        "backbone.layers.5.mixer.k_proj.weight",
        "transformer.blocks.0.mhsa.lq.weight",
        "model.layers.0.self_attn.kv_b_proj.weight",
        "layers.0.attention.wq.weight",
    ),
    "linear_attention": (
        "model.layers.0.linear_attn.in_proj_qkvz.weight",
        "backbone.layers.0.mixer.in_proj.weight",
        "backbone.layers.0.mixer.A_log",
        "backbone.layers.0.mixer.conv1d.weight",
        "model.layers.0.mamba.conv1d.weight",
        "model.layers.0.conv.in_proj.weight",
    ),
    "mlp": (
        "model.layers.3.mlp.down_proj.weight",
        "backbone.layers.1.mixer.up_proj.weight",
        "transformer.blocks.0.mlp.l1.0.weight",
    ),
    "moe_experts": (
        "model.layers.3.mlp.experts.17.gate_proj.weight",
        "model.layers.0.mlp.experts.gate_up_proj_blocks",
        "model.layers.4.moe.up_proj.weight",
        "model.layers.0.block_sparse_moe.experts.0.w1.weight",
        "backbone.layers.1.mixer.experts.3.up_proj.weight",
    ),
    "shared_experts": (
        "model.layers.3.mlp.shared_experts.up_proj.weight",
        "model.layers.3.mlp.shared_expert.up_proj.weight",
        "model.layers.3.share_expert.up_proj.weight",
    ),
    "router": (
        "model.layers.3.mlp.gate.weight",
        "model.layers.3.mlp.gate.e_score_correction_bias",
        "model.layers.0.mlp.router.weight",
        "model.layers.0.router.proj.weight",
        "model.layers.4.moe.gate.weight",
        "model.layers.0.block_sparse_moe.gate.weight",
        "model.layers.3.mlp.shared_expert_gate.weight",
    ),
    "embedding": (
        "model.embed_tokens.weight",
        "backbone.embeddings.weight",
        "transformer.emb.weight",
        "tok_embeddings.weight",
        "model.language_model.embed_tokens_per_layer.weight",
    ),
    "lm_head": (
        "lm_head.weight",
        "language_model.lm_head.weight",
        "output.weight",
        "transformer.linear.weight",
    ),
    "norm": (
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "backbone.layers.0.mixer.norm.weight",
    ),
    "vision": (
        "model.visual.blocks.0.mlp.fc1.weight",
        "vision_tower.encoder.layers.99.self_attn.q_proj.weight",
        "multi_modal_projector.linear_1.weight",
    ),
    "draft": (
        "mtp.fc.weight",
        "mtp.layers.0.mlp.experts.3.up_proj.weight",
        "model.layers.61.mlp.experts.0.up_proj.weight",
    ),
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in KIND_NAMES.items() for name in names]
)
def test_tensor_names_of_real_models_fall_into_their_kind(kind: str, name: str) -> None:
    assert kind_of(name, 61) == kind


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_experts": 128, "num_experts_per_tok": 8}, (128, 8)),
        ({"n_routed_experts": 256, "num_experts_per_tok": 8}, (256, 8)),
        ({"num_local_experts": 32, "experts_per_token": 4}, (32, 4)),
        ({"moe_num_experts": 288, "moe_top_k": 8}, (288, 8)),
        ({"num_experts": 128, "top_k_experts": 8}, (128, 8)),
        ({"moe": {"num_experts": 128, "num_experts_per_tok": 4}}, (128, 4)),
        ({"hidden_size": 64}, (None, None)),
        ({"num_local_experts": 0, "num_experts_per_tok": 0}, (None, None)),
    ],
)
def test_expert_counts_are_found_under_every_name(
    config: dict[str, object], expected: tuple[int | None, int | None]
) -> None:
    assert expert_counts(config) == expected


def test_checkpoint_carries_its_weights(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path / "m", tensors("nvfp4"), {"quantization_config": MODELOPT_NVFP4}
    )
    assert read_checkpoint(str(folder), environ={}).weights == weigh(tensors("nvfp4"))

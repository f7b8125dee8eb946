"""What the ModelOpt and NVFP4 patches must leave as it was, and what they do beyond the cases of
their probes.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nibble.engine.patching import run
from nibble.engine.patching.tree import Tree, open_tree
from tests.support.releases import trees
from tests.support.releases.probes import support

pytestmark = pytest.mark.vllm
QUANTIZATION = "vllm.model_executor.layers.quantization"
MODELS = "vllm.model_executor.models"


@cache
def patched_tree(folder: Path) -> Tree:
    return open_tree(trees.patched(folder))


@pytest.fixture
def patched(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return patched_tree(tmp_path_factory.getbasetemp() / "modelopt-patched")


@pytest.fixture
def pristine() -> Tree:
    return open_tree(trees.pristine("0.32.0"))


# --- exclusion lists of checkpoints (N16) ---------------------------------------------------------


@dataclass(frozen=True)
class Export:
    """A list in the form of an exporter, the vLLM model that reads it, and vLLM's names of
    layers of that model.
    """

    source: str
    model: str  # whose packed_modules_mapping applies
    mapper: str  # the class whose hf_to_vllm_mapper renames; empty: none
    entries: list[str]
    excluded: list[str]
    quantized: list[str]
    wrong_before: int = 0  # quantized layers that the pristine release excludes


def names(count: int, *patterns: str) -> list[str]:
    """Each pattern for each layer."""
    return [pattern.format(i) for i in range(count) for pattern in patterns]


LAYER = "language_model.model.layers.{}"
DEEPSEEK_KEPT = ("q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "kv_a_layernorm")
EXPORTS = [
    Export(
        "nvidia/Qwen3-235B-A22B-Instruct-2507-NVFP4: as sgl-project/sglang#18189 describes its"
        " list",
        "qwen3_moe.Qwen3MoeForCausalLM",
        "qwen3_moe.Qwen3MoeModel",
        [
            "lm_head",
            *names(
                94,
                *(f"model.layers.{{}}.self_attn.{p}_proj" for p in "kqv"),
                "model.layers.{}.mlp.gate",
            ),
        ],
        ["lm_head", *names(94, "model.layers.{}.self_attn.qkv_proj", "model.layers.{}.mlp.gate")],
        names(94, "model.layers.{}.self_attn.o_proj", "model.layers.{}.mlp.experts"),
    ),
    Export(
        "DeepSeek-R1 by ModelOpt 0.23: the kinds of names in peaceh-nv/TensorRT-LLM"
        " hf_quant_config.json",
        "deepseek_v2.DeepseekV2ForCausalLM",
        "",
        [
            "lm_head",
            "model.embed_tokens",
            *names(
                61,
                *(f"model.layers.{{}}.self_attn.{p}" for p in DEEPSEEK_KEPT),
                "model.layers.{}.input_layernorm",
            ),
            *(f"model.layers.{i}.mlp.gate" for i in range(3, 61)),
        ],
        [
            "lm_head",
            *names(61, "model.layers.{}.self_attn.q_b_proj", "model.layers.{}.self_attn.kv_b_proj"),
            *(f"model.layers.{i}.mlp.gate" for i in range(3, 61)),
        ],
        [
            *names(61, "model.layers.{}.self_attn.o_proj"),
            *names(3, "model.layers.{}.mlp.gate_up_proj", "model.layers.{}.mlp.down_proj"),
            *(
                f"model.layers.{i}.mlp.{p}"
                for i in range(3, 61)
                for p in ("experts", "shared_experts.gate_up_proj")
            ),
        ],
    ),
    Export(
        "Nemotron-H, layer 4 in BF16: the pair that ModelOpt wrote where layers 40 to 49 are"
        " quantized",
        "nemotron_h.NemotronHForCausalLM",
        "nemotron_h.NemotronHForCausalLM",
        [
            "backbone.layers.4",
            "backbone.layers.4.*",
            "lm_head",
            *names(52, "backbone.layers.{}.mixer.conv1d"),
        ],
        [
            "lm_head",
            "model.layers.4.mixer.in_proj",
            "model.layers.4.mixer.out_proj",
            *names(52, "model.layers.{}.mixer.conv1d"),
        ],
        [
            f"model.layers.{i}.mixer.{p}"
            for i in range(52)
            if i != 4
            for p in ("in_proj", "out_proj")
        ],
        wrong_before=20,
    ),
    Export(
        "Qwen3-VL: globs of whole subtrees, renamed by the model",
        "qwen3_vl.Qwen3VLForConditionalGeneration",
        "qwen3_vl.Qwen3VLForConditionalGeneration",
        [
            "lm_head",
            "model.visual*",
            *names(
                94,
                "model.language_model.layers.{}.self_attn*",
                "model.language_model.layers.{}.mlp.gate",
            ),
        ],
        [
            "language_model.lm_head",
            "visual.blocks.0.attn.qkv",
            "visual.merger.linear_fc1",
            *names(94, f"{LAYER}.self_attn.qkv_proj", f"{LAYER}.mlp.gate"),
        ],
        names(94, f"{LAYER}.mlp.experts"),
    ),
    Export(
        "Qwen3.5: projections of a fused linear attention, a glob over two modules, the exporter's"
        " MTP entry",
        "qwen3_5.Qwen3_5ForConditionalGeneration",
        "qwen3_5.Qwen3_5ForConditionalGeneration",
        [
            "lm_head*",
            "mtp.layers.0*",
            *names(
                48,
                *(
                    f"model.language_model.layers.{{}}.linear_attn.{p}"
                    for p in ("in_proj_a", "in_proj_b", "conv1d")
                ),
            ),
            *names(48, "model.language_model.layers.{}.mlp.shared_expert*"),
        ],
        [
            "language_model.lm_head",
            "mtp.layers.0.self_attn.qkv_proj",
            *names(48, f"{LAYER}.linear_attn.in_proj_ba", f"{LAYER}.linear_attn.conv1d"),
            *names(48, f"{LAYER}.mlp.shared_expert.gate_up_proj"),
            *names(48, f"{LAYER}.mlp.shared_expert_gate"),
        ],
        names(48, f"{LAYER}.linear_attn.in_proj_qkvz", f"{LAYER}.mlp.experts"),
    ),
    Export(
        "Gemma 4: attention and vision in BF16",
        "gemma4_mm.Gemma4ForConditionalGeneration",
        "gemma4_mm.Gemma4ForConditionalGeneration",
        [
            "lm_head",
            "model.embed_vision*",
            "model.vision_tower*",
            *names(30, "model.language_model.layers.{}.self_attn*"),
        ],
        [
            "language_model.lm_head",
            "embed_vision.embedding_projection",
            *names(30, f"{LAYER}.self_attn.qkv_proj", f"{LAYER}.self_attn.o_proj"),
        ],
        names(30, f"{LAYER}.mlp.gate_up_proj", f"{LAYER}.moe.experts"),
    ),
    Export(
        "by hand: names of the language model alone, in a model that wraps it, and bare names of"
        " projections",
        "qwen3_vl.Qwen3VLForConditionalGeneration",
        "qwen3_vl.Qwen3VLForConditionalGeneration",
        ["model.layers.0.mlp.down_proj", "q_proj", "k_proj", "v_proj"],
        ["language_model.model.layers.0.mlp.down_proj", *names(20, f"{LAYER}.self_attn.qkv_proj")],
        names(20, f"{LAYER}.self_attn.o_proj", f"{LAYER}.mlp.gate_up_proj"),
    ),
    Export(
        "by hand, short: a router without its layer",
        "qwen3_moe.Qwen3MoeForCausalLM",
        "qwen3_moe.Qwen3MoeModel",
        ["mlp.gate", "linear"],
        names(20, "model.layers.{}.mlp.gate"),
        names(20, "model.layers.{}.mlp.gate_up_proj", "model.layers.{}.linear_attn.out_proj"),
        wrong_before=40,
    ),
]


def excluded_by(tree: Tree, export: Export) -> set[str]:
    """Of the export's layers those that the tree builds unquantized, with the names its model
    gives them.
    """
    sources = support("syntax").Sources(tree)
    config = sources.load(f"{QUANTIZATION}.modelopt.ModelOptNvFp4Config").from_config(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": export.entries}
    )
    config.packed_modules_mapping = sources.load(f"{MODELS}.{export.model}.packed_modules_mapping")
    if export.mapper:
        mapper = sources.load(f"{MODELS}.{export.mapper}.hf_to_vllm_mapper")
        config.apply_vllm_mapper(mapper.get_rename_mapper())
    return {name for name in export.excluded + export.quantized if config.is_layer_excluded(name)}


@pytest.mark.parametrize("export", EXPORTS, ids=lambda export: export.source.partition(":")[0])
def test_every_right_exclusion_of_a_checkpoint_stays_and_no_other(
    export: Export, pristine: Tree, patched: Tree
):
    before = excluded_by(pristine, export)
    assert before >= set(export.excluded), "the case shows nothing: vLLM did not exclude these"
    assert len(before - set(export.excluded)) == export.wrong_before
    assert excluded_by(patched, export) == set(export.excluded)


def test_some_but_not_all_projections_of_a_fused_layer_are_still_refused(patched: Tree):
    entries = ["model.layers.0.self_attn.q_proj"]
    fused = ["model.layers.0.self_attn.qkv_proj"]
    export = Export("", "qwen3_moe.Qwen3MoeForCausalLM", "", entries, fused, [])
    with pytest.raises(ValueError, match="some but not all shards"):
        excluded_by(patched, export)


@pytest.mark.parametrize("entries", ["lm_head", {"lm_head": True}, 1])
def test_exclusions_that_are_no_list_are_still_refused(entries: object, patched: Tree):
    sources = support("syntax").Sources(patched)
    read = sources.load(f"{QUANTIZATION}.modelopt.ModelOptNvFp4Config").from_config
    with pytest.raises(ValueError, match="must be a list"):
        read({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": entries})


def test_ignore_counts_where_a_config_has_both_keys(patched: Tree):
    sources = support("syntax").Sources(patched)
    config = sources.load(f"{QUANTIZATION}.modelopt.ModelOptNvFp4Config").from_config(
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "ignore": ["lm_head"],
            "exclude_modules": ["visual"],
        }
    )
    assert config.exclude_modules == ["lm_head"]


# --- padding of gated experts (N12) ---------------------------------------------------------------


@pytest.mark.parametrize(
    "backend",
    ["VLLM_CUTLASS", "FLASHINFER_CUTLASS", "FLASHINFER_B12X", "FLASHINFER_CUTEDSL_BATCHED"],
)
def test_gated_experts_of_any_size_compute_what_the_checkpoint_says(backend: str, patched: Tree):
    moe = support("padded_moe")
    sources = support("syntax").Sources(patched)
    for size in (16, 48, 80, 96, 112, 176, 240, 336):
        experts = moe.Experts.of(size)
        prepared = moe.prepare(sources, backend, experts)
        assert prepared.intermediate == -(-size // 64) * 64 == prepared.w2.shape[-1] * 2
        assert prepared.w13.shape[1] == prepared.w13_scale.shape[1] == 2 * prepared.intermediate
        difference = moe.output(prepared, experts) - moe.expected_output(experts)
        assert difference.abs().max().item() < 1e-12, size


@pytest.mark.parametrize("backend", ["VLLM_CUTLASS", "FLASHINFER_CUTLASS"])
@pytest.mark.parametrize("size", [64, 192, 704, 768])
def test_experts_that_need_no_padding_are_prepared_byte_for_byte_as_before(
    backend: str, size: int, pristine: Tree, patched: Tree
):
    import torch

    moe = support("padded_moe")
    before, after = (
        moe.prepare(support("syntax").Sources(tree), backend, moe.Experts.of(size))
        for tree in (pristine, patched)
    )
    for name in ("w13", "w13_scale", "w2", "w2_scale"):
        assert torch.equal(
            getattr(before, name).view(torch.uint8), getattr(after, name).view(torch.uint8)
        ), name


def test_experts_whose_gate_and_up_rows_alternate_are_not_padded_by_halves(patched: Tree):
    moe = support("padded_moe")
    sources = support("syntax").Sources(patched)
    with pytest.raises(NotImplementedError):
        moe.prepare(sources, "VLLM_CUTLASS", moe.Experts.of(96), activation="SWIGLUOAI")
    assert (
        moe.prepare(
            sources, "VLLM_CUTLASS", moe.Experts.of(192), activation="SWIGLUOAI"
        ).intermediate
        == 192
    )


def edited(tree: Tree, folder: Path, name: str, old: str, new: str) -> Tree:
    """The tree's Python files, linked, with a text of one of them replaced."""

    def linked(source: str, target: str) -> None:
        if source.endswith(".py"):
            os.symlink(source, target)

    shutil.copytree(tree.path("vllm"), folder / "vllm", copy_function=linked)
    text = tree.text(name)
    assert text.count(old) == 1, f"{name} has changed"
    (folder / name).unlink()
    (folder / name).write_text(text.replace(old, new))
    return open_tree(folder)


def test_the_probe_sees_padding_at_the_end_of_gate_and_up_together(patched: Tree, tmp_path: Path):
    """As align_fp4_moe_weights_for_fi did before vLLM split the halves
    (vllm-project/vllm#48624).
    """
    tree = edited(
        patched,
        tmp_path,
        "vllm/model_executor/layers/quantization/utils/flashinfer_utils.py",
        "        padded_w13[:, padded_intermediate : padded_intermediate + intermediate, :] = (\n  "
        "          w13[:, intermediate:, :]\n        )\n    else:\n        padded_w13[:, :"
        " w13.shape[1], :] = w13\n\n    padded_w2 = w2.new_zeros((num_experts, hidden_size,"
        " padded_intermediate // 2))",
        "        padded_w13[:, intermediate : 2 * intermediate, :] = w13[:, intermediate:, :]\n"
        "    else:\n        padded_w13[:, : w13.shape[1], :] = w13\n\n"
        "    padded_w2 = w2.new_zeros((num_experts, hidden_size, padded_intermediate // 2))",
    )
    finding = run.load("n12_moe_padding").probe(tree)
    assert finding.state == "defect" and "largest difference" in finding.detail


# --- scales and messages (N18, N27) ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("loaded", "expected"),
    [
        ({"k_scale": 0.25, "v_scale": 0.5}, (1.0, 0.25, 0.5)),
        ({"k_scale": 0.25, "v_scale": 0.5, "q_scale": 0.75}, (0.75, 0.25, 0.5)),
        ({"k_scale": 0.25}, (1.0, 0.25, 0.25)),
        ({}, (1.0, 1.0, 1.0)),
    ],
)
def test_the_scales_of_an_attention_layer_are_what_they_were(
    loaded: dict[str, float], expected: tuple[float, float, float], pristine: Tree, patched: Tree
):
    for tree in (pristine, patched):
        layer, messages = loaded_attention(tree, loaded)
        assert (layer._q_scale.item(), layer._k_scale.item(), layer._v_scale.item()) == expected
        assert (layer._q_scale_float, layer._k_scale_float, layer._v_scale_float) == expected
    assert any("q scaling factor" in message for message in messages) == ("q_scale" not in loaded)


def loaded_attention(tree: Tree, scales: dict[str, float]) -> tuple[Any, list[str]]:
    """An attention layer with an FP8 cache after a checkpoint with these scales, and what the
    tree logged.
    """
    import torch

    messages = support("messages").Messages()
    platform = SimpleNamespace(is_fp8_fnuz=lambda: False)
    given = messages.given | {"vllm.platforms.current_platform": platform}
    method = (
        support("syntax")
        .Sources(tree, given)
        .load(f"{QUANTIZATION}.kv_cache.BaseKVCacheMethod")(None)
    )
    layer: Any = torch.nn.Module()
    layer.kv_cache_dtype = "fp8_e4m3"
    for name in ("_q_scale", "_k_scale", "_v_scale", "_prob_scale", "_k_scale_cpu", "_v_scale_cpu"):
        layer.register_buffer(name, torch.tensor(1.0))
    method.create_weights(layer)
    for name, value in scales.items():
        layer.get_parameter(name).data.fill_(value)
    method.process_weights_after_loading(layer)
    return layer, messages


def test_a_gpu_without_fp4_is_still_told_so(patched: Tree):
    """An H200 and an Ada GPU; the probe looks at SM90 and the Blackwell ones."""
    probe = run.load("n27_marlin_fp4_warning")
    for functions in probe.PREPARE.values():
        assert all(probe._logs(patched, functions[0], capability) for capability in (75, 89, 90))
        assert not any(
            probe._logs(patched, functions[0], capability)
            for capability in (100, 103, 110, 120, 121)
        )

"""vLLM's own loader with the plugin: whole models of many families load, and what lacks a part
of a weight ends by its name.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.changes import OPERATORS
from tests.support.models.generated_hybrid import HybridShape
from tests.support.models.generated_nvfp4 import Shape, write_checkpoint
from tests.support.models.tiny_drafts import DRAFTS, write_draft
from tests.support.paths import IN_VLLM, python_path

pytestmark = [pytest.mark.vllm, pytest.mark.when_changed(*OPERATORS)]
DENSE, EXPERTS = Shape(layers=3), Shape(layers=3, experts=4)
HYBRID = HybridShape(layers=4, experts=4, linear_heads=4, linear_head_dim=32)
KINDS = ("dense", "experts", "hybrid")
FORMS = ("bf16", "modelopt", "compressed-tensors")
BASE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 512,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
# One of each way to load: fused and not, biases, sinks, latent attention, shared keys, states, tied
# and own heads.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "phi3": {},
    "gemma3_text": {},
    "granitemoe": MOE,
    "glm4_moe": MOE,
    "gpt_oss": MOE | ALTERNATING,
    "deepseek_v3": MOE
    | {
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "qwen3_next": MOE
    | {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "decoder_sparse_step": 1,
        "head_dim": 32,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2},
    "jamba": MOE
    | {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "gemma3n_text": ALTERNATING
    | {
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "altup_num_inputs": 2,
        "laurel_rank": 8,
        "intermediate_size": [128] * 4,
        "tie_word_embeddings": True,
    },
    "laguna": MOE,
}
UNTIED = (
    "mamba2",
    "jamba",
    "phi3",
    "qwen2",
    "deepseek_v3",
    "qwen3_next",
    "gpt_oss",
    "glm4_moe",
    "laguna",
)
ROUTER_BIAS = "mlp.experts.e_score_correction_bias"

Tensors = dict[str, Tensor]
Loads = dict[str, dict[str, Any]]  # folder's name -> what was said of it


def write_family(folder: Path, model_type: str) -> Path:
    """Random weights of transformers' own module."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = BASE | {"tie_word_embeddings": model_type not in UNTIED} | FAMILIES[model_type]
    config = AutoConfig.for_model(model_type, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def without(*starts: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        gone = [name for name in tensors if name.startswith(starts)]
        assert gone
        for name in gone:
            del tensors[name]

    return change


def matching(pattern: str) -> Callable[[Tensors], None]:
    """Without the tensors of those names."""

    def change(tensors: Tensors) -> None:
        gone = [name for name in tensors if re.search(pattern, name)]
        assert gone
        for name in gone:
            del tensors[name]

    return change


def cut(name: str) -> Callable[[Tensors], None]:
    """One row less."""

    def change(tensors: Tensors) -> None:
        (found,) = (n for n in tensors if n in (f"{name}.weight", f"{name}.weight_packed"))
        tensors[found] = tensors[found][:-1].contiguous()

    return change


@dataclass(frozen=True)
class Damage:
    """A model, what is done to it, and the name that ends its load."""

    shape: Shape
    change: Callable[[Tensors], None]
    named: str


L = "model.layers."
DAMAGES = {
    "output projection of the last layer": Damage(
        DENSE, without(f"{L}2.self_attn.o_proj"), f"{L}2.self_attn.o_proj.weight"
    ),
    "one of three fused parts": Damage(
        DENSE, without(f"{L}1.self_attn.k_proj"), f"{L}1.self_attn.k_proj.weight"
    ),
    "last norm of the last layer": Damage(
        DENSE, without(f"{L}2.post_att"), f"{L}2.post_attention_layernorm.weight"
    ),
    "norm of one layer's queries": Damage(
        DENSE, without(f"{L}1.self_attn.q_norm"), f"{L}1.self_attn.q_norm.weight"
    ),
    "embedding": Damage(DENSE, without("model.embed"), "model.embed_tokens.weight"),
    "up of one expert": Damage(
        EXPERTS, without(f"{L}1.mlp.experts.2.up_"), f"{L}1.mlp.experts.routed_experts.2.w13"
    ),
    "an expert": Damage(
        EXPERTS, without(f"{L}1.mlp.experts.3."), f"{L}1.mlp.experts.routed_experts.3.w2"
    ),
    "up of every expert of a layer": Damage(
        EXPERTS, matching(r"s\.1\.mlp\.experts\.\d+\.up_"), f"{L}1.mlp.experts.routed_experts.0.w13"
    ),
    "up of every expert": Damage(
        EXPERTS, matching(r"\.experts\.\d+\.up_"), f"{L}0.mlp.experts.routed_experts.0.w13"
    ),
    "most experts of a layer": Damage(
        EXPERTS, matching(r"s\.1\.mlp\.experts\.[0-2]\."), f"{L}1.mlp.experts.routed_experts.0.w13"
    ),
    "a row of one expert too few": Damage(
        EXPERTS, cut(f"{L}1.mlp.experts.2.up_proj"), f"{L}1.mlp.experts.routed_experts.2.w13"
    ),
    "a row too few": Damage(DENSE, cut(f"{L}1.mlp.down_proj"), f"{L}1.mlp.down_proj.weight"),
    "a tensor too many": Damage(
        DENSE,
        lambda t: t.update({f"{L}7.self_attn.q_proj.weight": t["model.norm.weight"].clone()}),
        f"{L}7.self_attn.q_proj.weight (bfloat16 of shape [64])",
    ),
}


def damaged(folder: Path, kind: str, form: Any) -> Path:
    damage = DAMAGES[kind]
    write_checkpoint(folder, damage.shape, form)
    tensors = load_file(folder / "model.safetensors")
    damage.change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def change_family(folder: Path, family: str, change: Callable[[Tensors], None]) -> Path:
    write_family(folder, family)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def with_router_biases(tensors: Tensors) -> None:
    for number in (1, 2, 3):
        tensors[f"{L}{number}.{ROUTER_BIAS}"] = torch.arange(4.0) + number


# Family, what is done to it, and the name that ends its load.
FAMILY_DAMAGES = {
    "one bias of queries": (
        "qwen2",
        without(f"{L}1.self_attn.q_proj.bias"),
        f"{L}1.self_attn.q_proj.bias",
    ),
    "one bias of a router": (
        "laguna",
        without(f"{L}2.{ROUTER_BIAS}"),
        f"{L}2.mlp.experts.routed_experts.e_score",
    ),
}


@pytest.fixture(scope="module")
def loads(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Loads:
    """Folder's name -> what was said of its load; all of them in one process."""
    root = tmp_path_factory.mktemp("models")
    folders = [write_family(root / name, name) for name in FAMILIES]
    folders += [write_checkpoint(root / f"dense {form}", DENSE, form) for form in FORMS]
    folders += [write_checkpoint(root / f"experts {form}", EXPERTS, form) for form in FORMS]
    folders += [write_checkpoint(root / f"hybrid {form}", HYBRID, form) for form in FORMS]
    folders += [damaged(root / f"{kind} {form}", kind, form) for kind in DAMAGES for form in FORMS]
    folders += [
        change_family(root / name, family, change)
        for name, (family, change, _) in FAMILY_DAMAGES.items()
    ]
    wishes: list[dict[str, Any]] = [{"folder": str(folder)} for folder in folders]
    biased = change_family(root / "router biases", "laguna", with_router_biases)
    wishes.append(
        {"folder": str(biased), "show": f"{L}2.mlp.experts.routed_experts.e_score_correction_bias"}
    )
    wishes += [
        write_draft(root / name, name, root / draft.target) for name, draft in DRAFTS.items()
    ]
    path = python_path(installed)
    done = subprocess.run(
        [sys.executable, str(IN_VLLM / "loads_in_vllm.py")], env=os.environ | {"PYTHONPATH": path},
        input=json.dumps(wishes), capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"folder"')]
    assert len(found) == len(wishes), done.stderr[-3000:]
    return {Path(entry["folder"]).name: entry for entry in found}


@pytest.mark.parametrize(
    "family", [*FAMILIES, *(f"{kind} {form}" for kind in KINDS for form in FORMS)]
)
def test_a_whole_model_loads(family: str, loads: Loads) -> None:
    assert loads[family]["error"] == ""


def test_the_values_of_a_router_bias_beside_the_experts_arrive(loads: Loads) -> None:
    assert loads["router biases"]["values"] == [2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("name", FAMILY_DAMAGES)
def test_a_family_that_lacks_a_bias_ends_its_load_by_name(name: str, loads: Loads) -> None:
    assert FAMILY_DAMAGES[name][2] in loads[name]["error"]


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_may_lack_what_it_takes_from_its_target_and_nothing_else(
    name: str, loads: Loads
) -> None:
    error = loads[name]["error"]
    assert DRAFTS[name].named in error if DRAFTS[name].named else error == ""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_model_that_is_not_whole_ends_its_load_by_name(
    kind: str, form: str, loads: Loads
) -> None:
    error = loads[f"{kind} {form}"]["error"]
    assert DAMAGES[kind].named in error
    assert error.startswith(
        ("ValueError: Following weights were not initialized from checkpoint: {", "TensorError: ")
    )

"""What config.json describes against the tensors that are stored: refused before a load with the
tensor's name.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nibble.checkpoint import read_checkpoint
from nibble.checkpoint.headers import TensorInfo
from nibble.checkpoint.heads import head_dim, kv_heads
from nibble.checkpoint.layer_tensors import FILE, families, layer_problems
from nibble.checkpoint.layers import FAMILIES
from nibble.checkpoint.nvfp4 import Problem
from nibble.errors import ExitCode
from tests.support.models.tiny_checkpoint import LINEAR_SHAPES, Tensors, linear, write_checkpoint
from tests.support.models.tiny_model import MODELOPT_NVFP4, QWEN3
from tests.support.paths import ROOT
from tests.support.processor_time import within

COUNT = 3
LATENT = (FAMILIES["deepseek_v3"],)  # one latent vector in the place of heads of keys and values
LAST = f"model.layers.{COUNT - 1}."
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": 16,
                "symmetric": True,
            },
        }
    },
}
FORMS = {"bf16": None, "nvfp4": MODELOPT_NVFP4, "ct": COMPRESSED}


def qwen3(
    form: str = "bf16", model_type: str = "qwen3", experts: int = 0, first_dense: int = 0
) -> Tensors:
    """All tensors of a model of three layers."""
    found: Tensors = {
        "model.embed_tokens.weight": ("BF16", [128, 64]),
        "model.norm.weight": ("BF16", [64]),
    }
    found["lm_head.weight"] = ("BF16", [128, 64])
    for number in range(COUNT):
        layer = f"model.layers.{number}."
        for name, (rows, columns) in LINEAR_SHAPES.items():
            owners = [name]
            if name.startswith("mlp.") and number >= first_dense:
                owners = [
                    name.replace("mlp.", f"mlp.experts.{expert}.") for expert in range(experts)
                ] or owners
            for owner in owners:
                found |= linear(layer + owner, rows, columns, form)
        if experts and number >= first_dense:
            found[f"{layer}mlp.gate.weight"] = ("BF16", [experts, 64])
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}{name}.weight"] = ("BF16", [64])
        for name in ("q_norm", "k_norm") if model_type.startswith("qwen3") else ():
            found[f"{layer}self_attn.{name}.weight"] = ("BF16", [16])
        for name, rows in (("q", 64), ("k", 32), ("v", 32)) if model_type == "qwen2" else ():
            found[f"{layer}self_attn.{name}_proj.bias"] = ("BF16", [rows])
    return found


def problems(
    folder: Path, weights: Tensors, form: str = "bf16", **config: Any
) -> tuple[Problem, ...]:
    given = {"num_hidden_layers": COUNT, **config}
    if FORMS[form]:
        given["quantization_config"] = FORMS[form]
    return read_checkpoint(str(write_checkpoint(folder, weights, given))).problems


WHOLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3": ({}, {}),
    "qwen2 with biases": ({"model_type": "qwen2"}, {"model_type": "qwen2"}),
    "llama": ({"model_type": "llama"}, {"model_type": "llama"}),
    "experts": (
        {"model_type": "qwen3_moe", "experts": 4},
        {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 128},
    ),
    "first layer dense": (
        {"model_type": "qwen3_moe", "experts": 4, "first_dense": 1},
        {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 128},
    ),
    "no head_dim": ({"model_type": "llama"}, {"model_type": "llama", "head_dim": None}),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", WHOLE)
def test_a_whole_model_has_no_problem(kind: str, form: str, tmp_path: Path) -> None:
    made, config = WHOLE[kind]
    assert problems(tmp_path / "m", qwen3(form, **made), form, **config) == ()


@pytest.mark.parametrize("folder", ["nibble-demo", "nibble-demo-nvfp4", "nibble-demo-moe-nvfp4"])
def test_the_demos_have_no_problem_and_their_family_is_known(folder: str) -> None:
    found = read_checkpoint(str(ROOT / "models" / folder))
    assert found.problems == () and found.model_type in families()


# --- missing --------------------------------------------------------------------------------------

ABSENT = {
    "output projection of the last layer": (f"{LAST}self_attn.o_proj", {}),
    "second norm of the last layer": (f"{LAST}post_attention_layernorm.weight", {}),
    "first norm of the first layer": ("model.layers.0.input_layernorm.weight", {}),
    "norm of one layer's queries": ("model.layers.1.self_attn.q_norm.weight", {}),
    "one bias of one layer's queries": (
        "model.layers.1.self_attn.q_proj.bias",
        {"model_type": "qwen2"},
    ),
    "gate of one expert": (
        "model.layers.1.mlp.experts.2.gate_proj",
        {"model_type": "qwen3_moe", "experts": 4},
    ),
    "router of the last layer": (
        f"{LAST}mlp.gate.weight",
        {"model_type": "qwen3_moe", "experts": 4},
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ABSENT)
def test_what_one_layer_lacks_is_refused_by_name(kind: str, form: str, tmp_path: Path) -> None:
    start, made = ABSENT[kind]
    weights = {
        name: tensor for name, tensor in qwen3(form, **made).items() if not name.startswith(start)
    }
    config = {"num_experts": 4, "moe_intermediate_size": 128} if "experts" in made else {}
    found = problems(
        tmp_path / "m", weights, form, **config, model_type=made.get("model_type", "qwen3")
    )
    named = [problem for problem in found if problem.tensor.startswith(start)]
    assert named and {problem.code for problem in found} == {ExitCode.MODEL}
    assert "is missing" in named[0].error("here").line()


def test_a_layer_that_is_not_there_is_named(tmp_path: Path) -> None:
    weights = {name: tensor for name, tensor in qwen3().items() if not name.startswith(LAST)}
    (found,) = problems(tmp_path / "m", weights)
    assert found.tensor == LAST.rstrip(".") and "num_hidden_layers" in found.expected


def test_experts_of_one_layer_in_another_form_are_not_missing(tmp_path: Path) -> None:
    made = qwen3(model_type="qwen3_moe", experts=4)
    weights = {name: tensor for name, tensor in made.items() if "layers.1.mlp.experts" not in name}
    weights["model.layers.1.mlp.experts.gate_up_proj"] = ("BF16", [4, 64, 256])
    weights["model.layers.1.mlp.experts.down_proj"] = ("BF16", [4, 128, 64])
    config = {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 128}
    assert problems(tmp_path / "m", weights, **config) == ()


def test_a_module_that_some_layers_store_in_another_form_is_not_missing(tmp_path: Path) -> None:
    weights = qwen3()
    for number in (1, 2):
        shape = weights.pop(f"model.layers.{number}.mlp.up_proj.weight")[1]
        weights[f"model.layers.{number}.mlp.up_proj._weight_qdata"] = ("U8", shape)
    assert problems(tmp_path / "m", weights) == ()
    del weights["model.layers.2.mlp.up_proj._weight_qdata"]
    (found,) = problems(tmp_path / "n", weights)
    assert found.tensor == "model.layers.2.mlp.up_proj.weight"


def test_drafts_behind_the_last_layer_are_no_layers_too_many(tmp_path: Path) -> None:
    (found,) = problems(tmp_path / "m", qwen3(), num_hidden_layers=COUNT - 1)
    assert found.tensor.startswith(LAST) and found.expected.startswith(
        "2 layers (num_hidden_layers"
    )
    assert (
        problems(tmp_path / "n", qwen3(), num_hidden_layers=COUNT - 1, num_nextn_predict_layers=1)
        == ()
    )


def test_a_draft_in_its_own_repository_is_no_model_of_its_targets_family(tmp_path: Path) -> None:
    weights: Tensors = {"fc.weight": ("BF16", [64, 192]), "lm_head.weight": ("BF16", [32, 64])}
    weights |= linear("layers.0.self_attn.q_proj", 64, 128, "bf16")
    assert problems(tmp_path / "m", weights, num_hidden_layers=1) == ()


# --- shapes ---------------------------------------------------------------------------------------

WRONG_SIZES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 64,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", WRONG_SIZES)
def test_a_size_that_contradicts_the_tensors_is_named_with_a_tensor(
    key: str, form: str, tmp_path: Path
) -> None:
    found = [
        p
        for p in problems(tmp_path / "m", qwen3(form), form, **{key: WRONG_SIZES[key]})
        if p.kind == "misfit"
    ]
    assert found and found[0].code is ExitCode.MODEL
    assert key in found[0].expected and found[0].tensor in qwen3(form)


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_one_row_short_is_named(form: str, tmp_path: Path) -> None:
    weights = qwen3(form) | linear("model.layers.1.mlp.up_proj", 127, 64, form)
    (found,) = problems(tmp_path / "m", weights, form)
    assert found.tensor.startswith("model.layers.1.mlp.up_proj.") and "[127, 64]" in found.what
    assert found.expected.startswith("[128, 64] (intermediate_size, hidden_size")


def test_a_weight_of_a_draft_layer_that_does_not_fit_is_the_drafts_problem(tmp_path: Path) -> None:
    weights = qwen3() | linear(f"model.layers.{COUNT}.mlp.up_proj", 127, 64, "bf16")
    (found,) = problems(tmp_path / "m", weights, num_nextn_predict_layers=1)
    assert found.tensor == f"model.layers.{COUNT}.mlp.up_proj.weight" and found.is_draft


@pytest.mark.parametrize("value", [None, 0, -64, "64", 64.0, True, [64], 10**30])
@pytest.mark.parametrize("key", [*WRONG_SIZES, "num_hidden_layers", "num_experts"])
def test_odd_sizes_end_in_no_traceback(key: str, value: Any) -> None:
    text = QWEN3 | {key: value}
    tensors = {
        name: TensorInfo(name, dtype, tuple(shape), 0) for name, (dtype, shape) in qwen3().items()
    }
    layers = text["num_hidden_layers"] if type(text["num_hidden_layers"]) is int else None
    layer_problems(tensors, (), text, "qwen3", layers)


@pytest.mark.parametrize("value", [None, 0, -64, "64", 64.5, True, [64], {}])
@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"]
)
def test_a_size_that_is_no_number_above_0_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    (found,) = problems(tmp_path / "m", qwen3(), **{key: value})
    assert (
        found.error("m").what.startswith(f"{key} in m/config.json is ")
        and found.code is ExitCode.MODEL
    )


UNUSED = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "n_shared_experts",
    "shared_expert_intermediate_size",
)


@pytest.mark.parametrize("value", [0, None, [4, 4], -1])
@pytest.mark.parametrize("key", UNUSED)
def test_a_size_that_no_tensor_has_may_be_anything(key: str, value: Any, tmp_path: Path) -> None:
    assert problems(tmp_path / "m", qwen3(), **{key: value}) == ()


@pytest.mark.parametrize("key", ["num_experts", "moe_intermediate_size"])
def test_a_size_of_experts_that_are_stored_is_a_number_above_0(key: str, tmp_path: Path) -> None:
    made = qwen3(model_type="qwen3_moe", experts=4)
    config = {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 128, key: 0}
    (found,) = problems(tmp_path / "m", made, **config)
    assert found.tensor == key and found.what == "is 0"


def test_one_spelling_of_the_number_of_experts_is_enough(tmp_path: Path) -> None:
    made = qwen3(model_type="qwen3_moe", experts=4)
    config = {
        "model_type": "qwen3_moe",
        "num_experts": 0,
        "num_local_experts": 4,
        "moe_intermediate_size": 128,
    }
    assert problems(tmp_path / "m", made, **config) == ()


@pytest.mark.parametrize("model_type", ["ministral3", "glm4", "seed_oss", "ernie4_5"])
def test_a_head_dim_that_is_not_named_is_the_default_of_its_class(model_type: str) -> None:
    text: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128}
    for rows, is_odd in ((512, False), (64, True)):
        shapes = {
            f"model.layers.{number}.self_attn.q_proj.weight": (rows, 64) for number in range(COUNT)
        }
        tensors = {name: TensorInfo(name, "BF16", shape, 0) for name, shape in shapes.items()}
        assert bool(layer_problems(tensors, (), text, model_type, COUNT)) is is_odd
        # What null stands for differs between classes.
        assert layer_problems(tensors, (), text | {"head_dim": None}, model_type, COUNT) == ()


def test_a_nested_config_without_values_equal_to_the_default_is_whole(tmp_path: Path) -> None:
    """As transformers writes the text model of Mistral 3: 8 heads of keys and values are not
    named.
    """
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": COUNT,
        "head_dim": 4,
        "vocab_size": 128,
    }
    text = sizes | {"model_type": "mistral", "num_attention_heads": 16}
    made = {
        name if name.startswith("lm_head") else f"language_model.{name}": tensor
        for name, tensor in qwen3(model_type="mistral").items()
    }
    vision = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"]}
    assert problems(tmp_path / "m", made, **vision, text_config=text) == ()
    (found,) = problems(
        tmp_path / "n", made, **vision, text_config=text | {"num_key_value_heads": None}
    )
    assert "k_proj" in found.tensor and "num_key_value_heads" in found.expected


@pytest.mark.parametrize("key", ["head_dim", "num_key_value_heads"])
def test_a_size_that_follows_from_others_may_be_null(key: str, tmp_path: Path) -> None:
    wanted = (
        {"num_attention_heads": 2, "head_dim": 32}
        if key == "num_key_value_heads"
        else {"model_type": "llama"}
    )
    made = qwen3(model_type="llama")
    if key == "num_key_value_heads":
        made = {
            n: ("BF16", [64, 64]) if n.endswith(("k_proj.weight", "v_proj.weight")) else t
            for n, t in made.items()
        }
    assert problems(tmp_path / "m", made, **wanted | {"model_type": "llama", key: None}) == ()


def test_many_tensors_are_quick() -> None:
    """The tensors of a model with 256 experts in 60 layers: 10^5 and more names."""
    leaves = ("weight", "weight_scale")
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.{leaf}"
        for layer in range(66)
        for expert in range(256)
        for part in ("gate", "up", "down")
        for leaf in leaves
    ]
    tensors = {name: TensorInfo(name, "U8", (1, 1), 1) for name in names}
    text = QWEN3 | {"num_experts": 256, "moe_intermediate_size": 128}
    assert len(tensors) > 100_000
    within(3, lambda: layer_problems(tensors, (), text, "qwen3_moe", 66))


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_table_is_what_the_installed_transformers_saves() -> None:
    words = [sys.executable, str(ROOT / "tests/support/models/layer_tensors.py"), "show"]
    made = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert made[made.index("{") :].strip() == FILE.read_text().strip()


@pytest.mark.slow
def test_defaults_of_heads_are_those_of_the_installed_transformers() -> None:
    """For configs that leave a value out: of every family whose shapes or layers are known here."""
    config = pytest.importorskip("transformers").AutoConfig
    stated = {"num_attention_heads": 6, "hidden_size": 768}
    compared = 0
    for model_type in {*families(), *FAMILIES}:
        try:
            found = config.for_model(model_type, **stated).to_dict()
        except Exception:  # not in transformers, or its sizes have to fit each other
            continue
        given = stated | {"model_type": model_type}
        if found.get("num_key_value_heads") is not None and FAMILIES.get(model_type) not in LATENT:
            assert kv_heads(given) == found["num_key_value_heads"], model_type
            compared += 1
        if isinstance(found.get("head_dim"), int) and FAMILIES.get(model_type) not in LATENT:
            assert head_dim(given) == found["head_dim"], model_type
    assert compared > 40


FAMILY: Callable[[str], Any] = json.loads(FILE.read_text()).get


def test_the_table_has_symbols_for_what_config_json_says() -> None:
    assert FAMILY("qwen3")["layer"]["self_attn.o_proj.weight"] == ["hidden", "heads*head"]
    assert FAMILY("qwen2")["layer"]["self_attn.q_proj.bias"] == ["heads*head"]
    assert FAMILY("glm4_moe")["layer"]["mlp.shared_experts.up_proj.weight"] == [
        "shared_experts*expert",
        "hidden",
    ]

"""The list of unquantized layers follows the tensors: what is corrected, what is left alone and
what is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nibble.checkpoint import Checkpoint, read_checkpoint
from nibble.checkpoint.exclusions import correct, excluded
from nibble.errors import ExitCode, NibbleError
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.plan import Plan
from tests.support.models.tiny_checkpoint import Tensors, linear, tensors, write_checkpoint
from tests.support.models.tiny_model import MODELOPT_NVFP4

MTP = '{"method":"mtp","num_speculative_tokens":1}'
LLM_COMPRESSOR: dict[str, Any] = {
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
            "input_activations": {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": 16,
            },
        }
    },
}


def head(prefix: str, join: str, form: str, packed: str = "nvfp4") -> Tensors:
    """A draft: the layer that joins embedding and hidden state, and a decoder layer in another
    form.
    """
    found = linear(f"{prefix}.{join}", 64, 128, form)
    for name in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.experts.0.up_proj",
        "mlp.experts.1.up_proj",
    ):
        found |= linear(f"{prefix}.layers.0.{name}", 64, 64, packed)
    return found


def checkpoint(folder: Path, weights: Tensors, ignore: Any, **config: Any) -> Checkpoint:
    given = {"quantization_config": MODELOPT_NVFP4 | {"ignore": ignore}, "model_type": "exaone_moe"}
    return read_checkpoint(str(write_checkpoint(folder, weights, given | config)))


def corrected(found: Checkpoint, with_draft: bool = True) -> list[str] | None:
    assert found.modules is not None
    correction = correct(found.modules, with_draft)
    return correction and excluded(correction.config)


def test_a_plain_draft_layer_that_the_list_misses_is_added(tmp_path: Path) -> None:
    exported = ["lm_head", "mtp.layers.0*"]
    plain = checkpoint(
        tmp_path / "plain", tensors("nvfp4") | head("mtp", "fc", "bf16", "bf16"), exported
    )
    assert corrected(plain) == [*exported, "mtp.*"]
    joined = checkpoint(
        tmp_path / "joined", tensors("nvfp4") | head("mtp", "fc", "bf16"), ["lm_head"]
    )
    assert corrected(joined) == ["lm_head", "mtp.fc"]


def test_a_list_that_agrees_with_the_tensors_is_left_alone(tmp_path: Path) -> None:
    weights = tensors("nvfp4") | head("mtp", "fc", "bf16", "bf16")
    for number, ignore in enumerate((["lm_head", "mtp*"], ["lm_head", "mtp.fc", "mtp.layers.0.*"])):
        assert corrected(checkpoint(tmp_path / str(number), weights, ignore)) is None


def test_a_list_under_the_key_exclude_modules_is_read_as_the_patched_vllm_reads_it(
    tmp_path: Path,
) -> None:
    config = {name: value for name, value in MODELOPT_NVFP4.items() if name != "ignore"}
    weights = tensors("nvfp4") | head("mtp", "fc", "bf16", "bf16")
    given = {
        "quantization_config": config | {"exclude_modules": ["lm_head", "mtp*"]},
        "model_type": "exaone_moe",
    }
    assert corrected(read_checkpoint(str(write_checkpoint(tmp_path / "m", weights, given)))) is None


def test_a_draft_that_is_not_used_changes_nothing(tmp_path: Path) -> None:
    found = checkpoint(tmp_path / "m", tensors("nvfp4") | head("mtp", "fc", "bf16"), ["lm_head"])
    assert corrected(found, with_draft=False) is None and corrected(found) is not None


def test_a_quantized_layer_that_the_list_hides_is_given_back(tmp_path: Path) -> None:
    found = checkpoint(
        tmp_path / "m", tensors("nvfp4") | head("mtp", "fc", "bf16"), ["lm_head", "mtp*"]
    )
    assert corrected(found) == ["lm_head", "mtp.fc"]


def test_a_layer_beyond_the_last_one_is_the_draft_and_excluded_whole(tmp_path: Path) -> None:
    # GLM-4.7 with MTP, Model-Optimizer#750; shared_head.head has another name in vLLM
    # (deepseek_mtp.py:69).
    draft = linear("model.layers.1.shared_head.head", 128, 64, "bf16") | linear(
        "model.layers.1.mlp.down_proj", 64, 128, "bf16"
    )
    found = checkpoint(tmp_path / "m", tensors("nvfp4") | draft, ["lm_head"], model_type="glm4_moe")
    assert corrected(found) == ["lm_head", "model.layers.1.*"]
    assert corrected(found, with_draft=False) is None


def test_longcats_draft_is_excluded_by_the_names_vllm_has_for_it(tmp_path: Path) -> None:
    draft = linear("model.mtp.layers.0.eh_proj", 64, 128, "bf16")
    draft |= linear("model.mtp.layers.0.transformer_layer.mlp.down_proj", 64, 128, "bf16")
    found = checkpoint(
        tmp_path / "m",
        tensors("nvfp4") | draft,
        ["lm_head"],
        model_type="longcat_flash",
        num_layers=28,
    )
    assert corrected(found) == ["lm_head", "eh_proj", "model.layers.56.*"]


def test_routed_experts_count_as_one_module(tmp_path: Path) -> None:
    weights = tensors("nvfp4") | head("mtp", "fc", "bf16", "nvfp4")
    weights |= linear("model.layers.0.mlp.experts.0.up_proj", 64, 64, "bf16")
    weights |= linear("model.layers.0.mlp.experts.7.up_proj", 64, 64, "bf16")
    found = checkpoint(tmp_path / "m", weights, ["lm_head", "mtp.fc"])
    assert corrected(found) == ["lm_head", "mtp.fc", "model.layers.0.mlp.experts"]
    mixed = weights | linear("model.layers.0.mlp.experts.7.up_proj", 64, 64, "nvfp4")
    # No list can say it
    assert corrected(checkpoint(tmp_path / "mixed", mixed, ["lm_head", "mtp.fc"])) is None


def test_embeddings_routers_and_norms_are_no_business_of_the_list(tmp_path: Path) -> None:
    weights = tensors("nvfp4") | {"model.visual.pos_embed.weight": ("BF16", [16, 64]),
                                  "model.layers.0.mlp.gate.weight": ("BF16", [4, 64])}  # fmt: skip
    assert corrected(checkpoint(tmp_path / "m", weights, ["lm_head"])) is None
    qwen3 = checkpoint(tmp_path / "qwen3", weights, ["lm_head"], model_type="qwen3_moe")
    assert corrected(qwen3) == [
        "lm_head",
        "model.layers.0.mlp.gate",
    ]  # vllm 0.32 qwen3_moe.py:170 asks for it


def test_names_of_the_list_count_in_the_files_spelling_and_in_vllms(tmp_path: Path) -> None:
    weights = tensors("nvfp4") | linear(
        "model.language_model.layers.0.linear_attn.out_proj", 64, 64, "bf16"
    )
    for number, entry in enumerate(
        (
            "model.language_model.layers.0.linear_attn*",
            "language_model.model.layers.0.linear_attn*",
            "model.layers.0.linear_attn.out_proj",
        )
    ):
        assert corrected(checkpoint(tmp_path / str(number), weights, ["lm_head", entry])) is None


def test_compressed_tensors_gets_names_and_for_experts_an_expression(tmp_path: Path) -> None:
    weights = tensors("ct_w4a4") | head("mtp", "fc", "bf16", "bf16")
    config = {"quantization_config": LLM_COMPRESSOR}
    found = read_checkpoint(str(write_checkpoint(tmp_path / "m", weights, config)))
    attention = [f"mtp.layers.0.self_attn.{name}_proj" for name in "kqv"]
    assert corrected(found) == [
        "lm_head",
        "mtp.fc",
        *attention,
        r"re:(?:mtp\.layers\.0\.mlp\.experts)\.",
    ]
    ignored = {"quantization_config": LLM_COMPRESSOR | {"ignore": ["lm_head", "re:^mtp.*"]}}
    assert (
        corrected(read_checkpoint(str(write_checkpoint(tmp_path / "ignored", weights, ignored))))
        is None
    )
    # lm_head is not of class "Linear", and what no group targets is not quantized either
    targets = {
        "group_0": LLM_COMPRESSOR["config_groups"]["group_0"] | {"targets": [r"re:model\.layers.*"]}
    }
    named = {"quantization_config": LLM_COMPRESSOR | {"ignore": [], "config_groups": targets}}
    assert (
        corrected(read_checkpoint(str(write_checkpoint(tmp_path / "named", weights, named))))
        is None
    )


def test_hf_quant_config_alone_is_corrected_in_its_own_form(tmp_path: Path) -> None:
    inner = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": [],
    }
    legacy = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": inner}
    found = read_checkpoint(str(write_checkpoint(tmp_path / "m", tensors("nvfp4"), {}, legacy)))
    assert found.modules is not None and (correction := correct(found.modules, False)) is not None
    assert correction.config == legacy | {
        "quantization": legacy["quantization"] | {"exclude_modules": ["lm_head"]}
    }  # type: ignore[operator]


def test_without_headers_or_for_other_formats_nothing_is_known(tmp_path: Path) -> None:
    config = {"quantization_config": MODELOPT_NVFP4 | {"ignore": []}}
    assert read_checkpoint(str(write_checkpoint(tmp_path / "none", None, config))).modules is None
    for name, weights, given in (
        ("bf16", tensors("bf16"), {}),
        ("awq", tensors("awq"), {"quantization_config": {"quant_method": "awq"}}),
    ):
        assert (
            read_checkpoint(str(write_checkpoint(tmp_path / name, weights, given))).modules is None
        )


def test_a_list_too_long_for_a_command_is_not_given(tmp_path: Path) -> None:
    weights = tensors("ct_w4a4")
    for number in range(3000):
        weights |= linear(f"model.layers.0.side_{number:040d}", 8, 16, "bf16")
    found = read_checkpoint(
        str(write_checkpoint(tmp_path / "m", weights, {"quantization_config": LLM_COMPRESSOR}))
    )
    assert corrected(found) is None


# --- in the plan ----------------------------------------------------------------------------------


def plan(folder: Path, *words: str, **environ: str) -> Plan:
    return plan_for(read_wishes([str(folder), "--target", "gb10", *words], environ))


def model(folder: Path, form: str, model_type: str, ignore: list[str]) -> Path:
    config = {"quantization_config": MODELOPT_NVFP4 | {"ignore": ignore}, "model_type": model_type}
    return write_checkpoint(folder, tensors("nvfp4") | head("mtp", "fc", form), config)


def override(found: Plan) -> Mapping[str, Any]:
    return found.args["--hf-overrides"].value


def test_the_plan_overrides_the_whole_config_and_says_what_was_wrong(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", "bf16", "exaone_moe", ["lm_head"])
    assert "--hf-overrides" not in plan(folder).args
    found = plan(folder, "--speculative-config", MTP)
    # vLLM replaces a dictionary, it does not join it (config/model.py:544).
    assert override(found) == {
        "quantization_config": MODELOPT_NVFP4 | {"ignore": ["lm_head", "mtp.fc"]}
    }
    assert "mtp.fc" in found.args["--hf-overrides"].reason
    words = found.argv()
    assert json.loads(words[words.index("--hf-overrides") + 1]) == override(found)


def test_a_users_overrides_are_joined_and_their_quantization_config_stays(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", "bf16", "exaone_moe", ["lm_head"])
    more = plan(folder, "--speculative-config", MTP, "--hf-overrides", '{"rope_theta":1}')
    assert override(more)["rope_theta"] == 1 and override(more)["quantization_config"][
        "ignore"
    ] == [
        "lm_head",
        "mtp.fc",
    ]
    assert more.args["--hf-overrides"].source == "nibble's default + command line"
    for own in (
        {"quantization_config": {"ignore": []}},
        {"text_config": {"quantization_config": {}}},
    ):
        assert (
            override(plan(folder, "--speculative-config", MTP, "--hf-overrides", json.dumps(own)))
            == own
        )


def test_what_vllm_builds_unquantized_by_name_needs_no_list(tmp_path: Path) -> None:
    found = plan(
        model(tmp_path / "m", "bf16", "qwen3_next", ["lm_head"]), "--speculative-config", MTP
    )
    assert "--hf-overrides" not in found.args


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_moe"])
def test_a_quantized_projection_of_the_draft_is_taken_off_the_list(
    tmp_path: Path, model_type: str
) -> None:
    """nibble's plugin has vLLM build it as it is stored; a list that names it would have the
    last word.
    """
    sound = plan(
        model(tmp_path / "a", "nvfp4", model_type, ["lm_head"]), "--speculative-config", MTP
    )
    assert "--hf-overrides" not in sound.args
    wrong = plan(
        model(tmp_path / "b", "nvfp4", model_type, ["lm_head", "mtp.fc"]),
        "--speculative-config",
        MTP,
    )
    assert override(wrong)["quantization_config"]["ignore"] == ["lm_head"]


def test_a_draft_that_no_flag_reaches_is_refused_and_the_model_without_it_is_not(
    tmp_path: Path,
) -> None:
    folder = model(tmp_path / "m", "bf16", "nemotron_h", ["lm_head"])
    with pytest.raises(NibbleError) as caught:
        plan(folder, "--speculative-config", MTP)
    assert caught.value.code == ExitCode.CONFIG and "mtp.fc" in caught.value.line()
    assert "without --speculative-config" in caught.value.line()
    assert "--hf-overrides" not in plan(folder).args


def test_a_draft_of_another_repository_is_not_this_checkpoints_business(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", "nvfp4", "qwen3_next", ["lm_head"])
    other = json.dumps({"method": "mtp", "num_speculative_tokens": 1, "model": "acme/draft"})
    assert "--hf-overrides" not in plan(folder, "--speculative-config", other).args

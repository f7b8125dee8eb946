"""The embedded demo models as files: shapes, scales, size, modes, and the questions they are
trained on.
"""

from __future__ import annotations

import json
import math
import stat
import struct
from pathlib import Path

import pytest
from demo_dialogues import (
    UNKNOWN_ANSWER,
    DialogueSource,
    exit_code,
    read_other_prompts,
    read_questions,
    typed,
    variants,
)

from nibble.checkpoint import read_checkpoint
from nibble.checkpoint.source import FolderSource
from nibble.checkpoint.verify import check_scales
from nibble.cli.inspection import inspect
from nibble.plan.gather import local_model
from tests.support.paths import ROOT

MODELS_DIR = ROOT / "models"
MODEL_DIR = MODELS_DIR / "nibble-demo"

# NVFP4 forms and how many weights they have: 4 layers of q, k, v, o and of gate, up, down, dense or
# for 8 experts
NVFP4_WEIGHTS = {"nibble-demo-nvfp4": 4 * (4 + 3), "nibble-demo-moe-nvfp4": 4 * (4 + 8 * 3)}


def safetensors_header(path: Path) -> dict[str, dict]:
    raw = path.read_bytes()
    (header_bytes,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + header_bytes])
    header.pop("__metadata__", None)
    assert (
        max(tensor["data_offsets"][1] for tensor in header.values()) == len(raw) - 8 - header_bytes
    )
    return header


@pytest.fixture(scope="module")
def tensors() -> dict[str, dict]:
    return safetensors_header(MODEL_DIR / "model.safetensors")


@pytest.fixture(scope="module")
def config() -> dict:
    return json.loads((MODEL_DIR / "config.json").read_text())


def test_every_gemm_dimension_is_a_multiple_of_128(tensors: dict[str, dict]) -> None:
    matrices = {name: t["shape"] for name, t in tensors.items() if len(t["shape"]) == 2}
    assert len(matrices) == 4 * 7 + 1
    odd = {name: shape for name, shape in matrices.items() if any(size % 128 for size in shape)}
    assert not odd


def test_model_has_at_most_five_million_bf16_parameters(tensors: dict[str, dict]) -> None:
    assert {t["dtype"] for t in tensors.values()} == {"BF16"}
    parameters = sum(math.prod(t["shape"]) for t in tensors.values())
    assert parameters <= 5_000_000
    # the model says its own size when it does not know an answer
    assert f"{parameters / 1e6:.1f}-million" in UNKNOWN_ANSWER


def test_model_is_qwen3_with_tied_embeddings(config: dict, tensors: dict[str, dict]) -> None:
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in tensors
    assert tensors["model.embed_tokens.weight"]["shape"] == [
        config["vocab_size"],
        config["hidden_size"],
    ]


def test_attention_head_size_is_one_that_vllm_runs_on_a_cpu(config: dict) -> None:
    # vllm 0.32 v1/attention/backends/cpu_attn.py:70
    assert config["head_dim"] in {32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512}


@pytest.mark.parametrize("model", ["nibble-demo", *NVFP4_WEIGHTS])
def test_model_files_are_readable_by_every_user(model: str) -> None:
    # save_pretrained writes model.safetensors 0600; the image runs as user 2000
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in (MODELS_DIR / model).iterdir()
    }
    assert {name for name, mode in modes.items() if mode & 0o444 != 0o444} == set()


def test_all_models_together_stay_under_20_mb() -> None:
    total_bytes = sum(path.stat().st_size for path in MODELS_DIR.rglob("*") if path.is_file())
    assert total_bytes < 20_000_000


def test_end_tokens_agree_between_tokenizer_config_and_generation_config(config: dict) -> None:
    tokenizer = json.loads((MODEL_DIR / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokenizer_config = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())
    generation = json.loads((MODEL_DIR / "generation_config.json").read_text())
    assert config["eos_token_id"] == ids[tokenizer_config["eos_token"]]
    assert config["eos_token_id"] in generation["eos_token_id"]
    # vLLM's default sampling parameters come from here: greedy
    assert generation["temperature"] == 0.0
    assert len(tokenizer["model"]["vocab"]) == config["vocab_size"]


def test_every_byte_is_in_the_vocabulary() -> None:
    vocabulary = json.loads((MODEL_DIR / "tokenizer.json").read_text())["model"]["vocab"]
    assert len([token for token in vocabulary if len(token) == 1]) == 256


def test_chat_template_renders_system_user_and_assistant_turns() -> None:
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(
        (MODEL_DIR / "chat_template.jinja").read_text()
    )
    turns = [("system", "Be brief."), ("user", "a "), ("assistant", "b"), ("user", "c")]
    text = template.render(
        messages=[{"role": role, "content": content} for role, content in turns],
        add_generation_prompt=True,
    )
    expected = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    assert text == expected + "<|im_start|>assistant\n"


def test_at_least_forty_questions_about_nvfp4_and_nibble_each_worded_once() -> None:
    rows = read_questions()
    assert len(rows) >= 40
    wordings = [text.lower() for row in rows for text in (row.question, *row.also)]
    assert len(wordings) == len(set(wordings))


def test_prompts_with_no_answer_are_not_among_the_questions() -> None:
    trained, held_out = read_other_prompts()
    assert not set(trained) & set(held_out)
    asked = {
        text
        for row in read_questions()
        for text in (row.question, *row.also, *variants(row.question))
    }
    assert not asked & {*trained, *held_out}


def test_exit_code_answers_cover_every_exit_code_of_nibble() -> None:
    errors = pytest.importorskip("nibble.errors")
    asked = {exit_code(row.question) for row in read_questions()} - {None}
    assert asked == {int(code) for code in errors.ExitCode}


def test_a_mistyped_question_keeps_its_digits() -> None:
    import random

    rng = random.Random(0)
    for row in read_questions():
        for _ in range(30):
            digits = [c for c in typed(row.question, rng) if c.isdigit()]
            assert digits == [c for c in row.question if c.isdigit()]


def test_training_conversations_repeat_with_the_same_seed() -> None:
    rows, (prompts, _) = read_questions(), read_other_prompts()

    def first_hundred(seed: int) -> list:
        source = iter(DialogueSource(rows, prompts, seed))
        return [next(source) for _ in range(100)]

    assert first_hundred(1) == first_hundred(1)
    assert first_hundred(1) != first_hundred(2)


@pytest.mark.parametrize("model", NVFP4_WEIGHTS)
def test_an_nvfp4_form_is_sound_w4a4_that_needs_its_scales_merged(model: str) -> None:
    found = read_checkpoint(str(MODELS_DIR / model))
    assert (found.scheme.name, found.scheme.vllm_quantization) == ("NVFP4", "modelopt_fp4")
    assert len(found.nvfp4) == NVFP4_WEIGHTS[model]
    assert all(
        weight.input_scale and not weight.rows % 128 and not weight.columns % 128
        for weight in found.nvfp4
    )
    check_scales(found, with_draft=False)
    seen = inspect(FolderSource(model, "local", MODELS_DIR / model, None), found, deep=True)
    assert (seen.problems, seen.wrong_modules, seen.exit_code) == ((), (), 0)
    assert len(seen.groups) == (8 if model == "nibble-demo-nvfp4" else 4 + 4 * 8)
    assert {group.quality for group in seen.groups} <= {"column scale", "expert factor"}


@pytest.mark.parametrize("model", NVFP4_WEIGHTS)
def test_scales_of_every_fused_layer_are_far_apart(model: str) -> None:
    found = read_checkpoint(str(MODELS_DIR / model))
    for group in inspect(
        FolderSource(model, "local", MODELS_DIR / model, None), found, deep=True
    ).groups:
        assert max(group.scales) > 1.4 * min(group.scales), group.name


@pytest.mark.parametrize("model", NVFP4_WEIGHTS)
def test_an_nvfp4_form_has_the_bf16_models_tokenizer_and_template(model: str) -> None:
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (MODELS_DIR / model / name).read_bytes() == (MODEL_DIR / name).read_bytes()


def test_each_weight_of_the_dense_nvfp4_form_is_the_bf16_one_to_the_error_of_nvfp4() -> None:
    import torch
    from nibble_kernels.weight_quant import Nvfp4Weight, dequantize
    from safetensors.torch import load_file

    original = load_file(MODEL_DIR / "model.safetensors")
    packed = load_file(MODELS_DIR / "nibble-demo-nvfp4" / "model.safetensors")
    modules = [name.removesuffix("_scale_2") for name in packed if name.endswith(".weight_scale_2")]
    assert len(modules) == 28
    for name in modules:
        rounded = dequantize(
            Nvfp4Weight(packed[name], packed[f"{name}_scale"], packed[f"{name}_scale_2"])
        )
        error = torch.linalg.norm(rounded - original[name].float()) / torch.linalg.norm(
            original[name].float()
        )
        assert 0.07 < float(error) < 0.11, name


@pytest.mark.parametrize("model", ["nibble-demo", *NVFP4_WEIGHTS])
def test_a_demo_is_found_by_its_name(model: str) -> None:
    assert local_model(model) == MODELS_DIR / model

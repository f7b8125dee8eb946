"""--gemma4-attention: off by default, said to be unmeasured, and refused where vLLM would not
take it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nibble.engine.schema import load_schema
from nibble.errors import ExitCode, NibbleError
from nibble.machine.hardware import Gpu, Hardware
from nibble.plan import gather as prepare
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.models.gemma4 import has_flashinfer_compiler
from nibble.plan.plan import Plan
from tests.support.models.tiny_model import QWEN3, write_model
from tests.support.refusals import refusal_of

TEXT: dict[str, Any] = QWEN3 | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}
IMAGES = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "text_config": TEXT | {"use_bidirectional_attention": "vision"},
    "vision_config": {"model_type": "gemma4_vision"},
}


def plan(folder: Path | str, *words: str, target: str = "gb10", **environ: str) -> Plan:
    return plan_for(read_wishes([str(folder), "--target", target, *words], environ))


def refusal(folder: Path | str, *words: str, target: str = "gb10", **environ: str) -> str:
    return refusal_of(
        lambda: plan(folder, *words, target=target, **environ), ExitCode.CONFIG
    ).line()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_model(tmp_path / "text", TEXT)


def test_by_default_vllm_chooses(text: Path) -> None:
    found = plan(text)
    assert not {"--attention-backend", "--attention-config"} & set(found.args)


def test_each_choice_becomes_vllms_own_flag_and_says_it_is_unmeasured(text: Path) -> None:
    layered = plan(text, "--gemma4-attention", "per-layer", target="sm120").args[
        "--attention-config"
    ]
    assert layered.value == {"backend_per_kind": {"sliding_window": "FLASH_ATTN"}}
    assert not load_schema().check_json("--attention-config", layered.value)
    flashinfer = plan(text, NIBBLE_GEMMA4_ATTENTION="flashinfer").args["--attention-backend"]
    assert flashinfer.value == "FLASHINFER"
    for choice in (layered, flashinfer):
        assert "unmeasured" in choice.reason


def test_a_users_flag_on_the_command_line_wins_over_the_variable(text: Path) -> None:
    found = plan(text, "--attention-backend", "TRITON_ATTN", NIBBLE_GEMMA4_ATTENTION="flashinfer")
    assert found.args["--attention-backend"].value == "TRITON_ATTN"


def test_an_unknown_choice_is_refused(text: Path) -> None:
    with pytest.raises(NibbleError) as caught:
        plan(text, "--gemma4-attention", "flash")
    assert caught.value.code == ExitCode.USAGE and "per-layer" in caught.value.line()


@pytest.mark.parametrize("choice", ["per-layer", "flashinfer"])
def test_other_models_and_other_targets_are_refused(
    text: Path, tmp_path: Path, choice: str
) -> None:
    other = write_model(tmp_path / "qwen")
    assert "a Gemma 4 model" in refusal(other, "--gemma4-attention", choice)
    # Mixed causal and bidirectional attention; vLLM refuses FLASHINFER for it
    # (model_executor/models/config.py:334)
    diffusion = write_model(
        tmp_path / "diffusion", TEXT | {"architectures": ["DiffusionGemmaForBlockDiffusion"]}
    )
    assert "a Gemma 4 model" in refusal(diffusion, "--gemma4-attention", choice)
    for target in ("b200", "hopper", "cpu"):
        assert target in refusal(text, "--gemma4-attention", choice, target=target)


def test_per_layer_needs_a_16_bit_kv_cache(text: Path, tmp_path: Path) -> None:
    line = refusal(text, "--gemma4-attention", "per-layer", "--kv-cache-dtype", "fp8")
    assert "fp8" in line and "--kv-cache-dtype bfloat16" in line
    declared = TEXT | {
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "kv_cache_scheme": "FP8",
        }
    }
    folder = write_model(tmp_path / "declared", declared)
    assert "fp8_e4m3" in refusal(folder, "--gemma4-attention", "per-layer")
    for words in (
        ["--gemma4-attention", "per-layer", "--kv-cache-dtype", "bfloat16"],
        ["--gemma4-attention", "flashinfer"],
    ):
        assert plan(folder, *words)


@pytest.mark.parametrize("choice", ["per-layer", "flashinfer"])
def test_images_need_triton_on_these_gpus(tmp_path: Path, choice: str) -> None:
    folder = write_model(tmp_path / "images", IMAGES)
    assert "--language-model-only" in refusal(folder, "--gemma4-attention", choice)
    for words in (["--language-model-only"], ["--limit-mm-per-prompt", '{"image":0,"video":0}']):
        assert plan(folder, "--gemma4-attention", choice, *words)


def test_flashinfer_is_refused_where_nothing_can_build_its_kernels(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(0, "NVIDIA GB10", (12, 1), None, None, "GPU-0")
    here = Hardware((gpu,), "580.105.08", "13.0", "aarch64", 8, frozenset(), 128 << 30, 100 << 30)
    monkeypatch.setattr(prepare, "detect", lambda environ: here)
    toolkit = tmp_path / "cuda"
    environ = {"PATH": str(tmp_path / "bin"), "CUDA_HOME": str(toolkit)}
    assert "nvcc and ninja" in refusal(text, "--gemma4-attention", "flashinfer", **environ)
    assert plan(text, "--gemma4-attention", "per-layer", **environ)
    for tool in (toolkit / "bin" / "nvcc", tmp_path / "bin" / "ninja"):
        assert not has_flashinfer_compiler(environ)
        tool.parent.mkdir(parents=True)
        tool.write_text("#!/bin/sh\n")
        tool.chmod(0o755)
    assert has_flashinfer_compiler(environ)
    assert plan(text, "--gemma4-attention", "flashinfer", **environ)

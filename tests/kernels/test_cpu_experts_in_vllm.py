"""Experts in NVFP4 through a real vLLM on its CPU platform, with gate and up of unequal global scales."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from generated_nvfp4 import Form, Shape, write_checkpoint
from safetensors.torch import load_file, save_file
from serving import clean_environ

SHAPE = Shape(experts=4)
PROMPT = [5, 17, 33, 101, 120, 7, 9, 11, 64, 80, 2]
PROGRAM = Path(__file__).parents[1] / "fixtures/vllm_logprobs.py"
BF16_ROUNDING = 0.1  # of two ways to add up the same experts in BF16, logits up to about 10


def answer(folder: Path, installed: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    environ = clean_environ(tmp_path, VLLM_ENABLE_V1_MULTIPROCESSING="0", PYTHONPATH=str(installed))
    words = [sys.executable, str(PROGRAM), str(folder), "{}", json.dumps(PROMPT)]
    return subprocess.run(words, env=environ, text=True, capture_output=True, check=False, cwd=tmp_path)


def logprobs(folder: Path, installed: Path, tmp_path: Path) -> torch.Tensor:
    done = answer(folder, installed, tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return torch.tensor(json.loads(done.stdout.rpartition("RESULT ")[2]))


@pytest.fixture(scope="module")
def expected(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """The same weights in BF16, by vLLM's own experts."""
    folder = tmp_path_factory.mktemp("bf16")
    return logprobs(write_checkpoint(folder / "model", SHAPE, "bf16"), installed, folder)


@pytest.mark.vllm
@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors"])
def test_they_answer_as_the_same_weights_in_bf16(
    form: Form, installed: Path, expected: torch.Tensor, tmp_path: Path
) -> None:
    found = logprobs(write_checkpoint(tmp_path / "model", SHAPE, form), installed, tmp_path)
    assert (found - expected).abs().max() < BF16_ROUNDING


@pytest.mark.vllm
@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors"])
def test_quantized_activations_change_the_answer_a_little(
    form: Form, installed: Path, expected: torch.Tensor, tmp_path: Path
) -> None:
    found = logprobs(write_checkpoint(tmp_path / "model", SHAPE, form, w4a4=True), installed, tmp_path)
    assert BF16_ROUNDING < (found - expected).abs().max() < 1


@pytest.mark.vllm
@pytest.mark.parametrize(
    "missing", ["up_proj.weight_scale_2", "down_proj.input_scale", "gate_proj.weight_scale"]
)
def test_a_scale_that_the_checkpoint_lacks_is_named(missing: str, installed: Path, tmp_path: Path) -> None:
    """vLLM would compute with what lay in memory."""
    folder = write_checkpoint(tmp_path / "model", SHAPE, "modelopt", w4a4=True)
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.layers.1.mlp.experts.2.{missing}"]
    save_file(tensors, folder / "model.safetensors")
    done = answer(folder, installed, tmp_path)
    weight = "w2" if "down" in missing else "w13"
    assert done.returncode != 0
    assert (
        f"model.layers.1.mlp.experts.{weight}_{missing.partition('.')[2]} was not loaded"
        in done.stderr + done.stdout
    )

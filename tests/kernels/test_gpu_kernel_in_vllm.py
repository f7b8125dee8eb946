"""vLLM with nibble's GPU kernel as its linear layers, on the CPU platform: what reaches the operators, eager and compiled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpu_kernel_anywhere
import pytest
import torch
import vllm_logprobs
from generated_nvfp4 import Form, Shape, write_checkpoint

pytestmark = pytest.mark.vllm
PROMPT = [5, 17, 33, 101, 120, 7, 9, 11, 64, 80, 2]
BF16_ROUNDING = 0.1
OURS: dict[str, Any] = {"linear_kernel": "nibble", "nvfp4_activations": "bf16"}


def run(
    installed: Path, here: Path, jobs: list[vllm_logprobs.Job], **environ: str
) -> tuple[list[Any], list[Any]]:
    """Results of the jobs, and which layers of their models come with silu · mul."""
    info = here / "anywhere-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: anywhere\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nanywhere = gpu_kernel_anywhere:register\n"
    )
    path = f"{installed}:{here}:{Path(gpu_kernel_anywhere.__file__).parent}"
    results, _ = vllm_logprobs.run(jobs, here, PYTHONPATH=path, FUSED=str(here / "fused"), **environ)
    return results, [json.loads(line) for line in (here / "fused").read_text().splitlines()]


OPTIONS = {"max_model_len": 256}


OUR_OPTIONS = {"additional_config": {"nibble": OURS}}


def largest_difference(one: list[float], other: list[float]) -> float:
    return float((torch.tensor(one) - torch.tensor(other)).abs().max())


def test_gate_and_up_come_with_silu_mul_and_answer_as_before(installed: Path, tmp_path: Path) -> None:
    """Of both forms of checkpoints."""
    folders = {
        form: write_checkpoint(tmp_path / form, Shape(), form) for form in ("modelopt", "compressed-tensors")
    }
    jobs: list[vllm_logprobs.Job] = [(str(folder), {}, PROMPT) for folder in folders.values()]
    jobs += [(str(folder), OUR_OPTIONS, PROMPT) for folder in folders.values()]
    (modelopt, compressed, *ours), fused = run(installed, tmp_path, jobs)
    assert largest_difference(ours[0], modelopt) < BF16_ROUNDING
    assert largest_difference(ours[1], compressed) < BF16_ROUNDING
    layers = [f"model.layers.{i}.mlp.gate_up_proj" for i in range(Shape().layers)]
    assert fused == [[], [], layers, layers]


def test_experts_answer_as_the_same_weights_in_bf16(installed: Path, tmp_path: Path) -> None:
    """Of both forms, gate and up with unequal global scales; a prompt long enough for the products of torch, and a short one."""
    shape = Shape(experts=4)
    forms: tuple[Form, ...] = ("bf16", "modelopt", "compressed-tensors")
    folders = [str(write_checkpoint(tmp_path / form, shape, form)) for form in forms]
    jobs: list[vllm_logprobs.Job] = [
        (folder, OPTIONS, prompt) for folder in folders for prompt in (PROMPT, PROMPT * 13)
    ]
    (short, long, *ours), _ = run(installed, tmp_path, jobs, OUR_EXPERTS="1")
    for one, other in zip(ours, (short, long) * 2, strict=True):
        assert largest_difference(one, other) < BF16_ROUNDING


@pytest.mark.slow
def test_compiled_it_answers_as_step_by_step(installed: Path, tmp_path: Path) -> None:
    folder = str(write_checkpoint(tmp_path / "model", Shape(), "modelopt"))
    jobs: list[vllm_logprobs.Job] = [
        (folder, OUR_OPTIONS | {"enforce_eager": eager}, PROMPT) for eager in (True, False)
    ]
    (eager, compiled), _ = run(installed, tmp_path, jobs)
    assert largest_difference(eager, compiled) < BF16_ROUNDING

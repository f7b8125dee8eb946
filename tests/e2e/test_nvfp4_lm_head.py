"""The output head in NVFP4 through a real vLLM on the CPU: loaded where the model class passes no quant_config, or made so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nvfp4_head import expected_logprobs, write
from serving import clean_environ

FIXTURE = Path(__file__).parents[1] / "fixtures/nvfp4_head.py"
BF16_ROUNDING = 0.05  # of a model in BF16 beside one in float32, logits up to about 10


def serve(
    folder: Path, head: str, tmp_path: Path, options: dict[str, str], **environ: str
) -> subprocess.CompletedProcess[str]:
    write(folder, head)
    words = [sys.executable, str(FIXTURE), str(folder), json.dumps({"nibble": options})]
    environment = clean_environ(tmp_path, VLLM_ENABLE_V1_MULTIPROCESSING="0", **environ)
    return subprocess.run(words, env=environment, text=True, capture_output=True, check=False, cwd=tmp_path)


def logprobs(done: subprocess.CompletedProcess[str]) -> torch.Tensor:
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return torch.tensor(json.loads(lines[0].removeprefix("RESULT ")))


@pytest.mark.vllm
def test_a_model_class_that_passes_no_quant_config_loads_a_quantized_head(tmp_path: Path) -> None:
    found = logprobs(serve(tmp_path / "model", "nvfp4", tmp_path, {}))
    assert (found - expected_logprobs("nvfp4")).abs().max() < BF16_ROUNDING


@pytest.mark.vllm
def test_vllm_alone_does_not_load_it(tmp_path: Path) -> None:
    done = serve(tmp_path / "model", "nvfp4", tmp_path, {}, VLLM_PLUGINS="")
    assert done.returncode != 0
    assert "lm_head.weight" in done.stdout + done.stderr


@pytest.mark.vllm
def test_a_bf16_head_is_quantized_at_load_and_answers_as_that_head_should(tmp_path: Path) -> None:
    done = serve(tmp_path / "model", "bf16", tmp_path, {"quantize_lm_head": "nvfp4"})
    found = logprobs(done)
    assert "lm_head quantized to NVFP4 at load" in done.stdout + done.stderr
    assert (found - expected_logprobs("nvfp4")).abs().max() < BF16_ROUNDING
    assert (found - expected_logprobs("bf16")).abs().max() > BF16_ROUNDING


@pytest.mark.vllm
def test_a_bf16_head_stays_as_it_is_without_the_option(tmp_path: Path) -> None:
    found = logprobs(serve(tmp_path / "model", "bf16", tmp_path, {}))
    assert (found - expected_logprobs("bf16")).abs().max() < BF16_ROUNDING

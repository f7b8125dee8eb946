"""nibble's decoder operators beside vLLM's modules, in a real vLLM on its CPU platform."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.changes import OPERATORS
from tests.support.in_vllm.decoder_in_vllm import TOKENS
from tests.support.models.generated_families import (
    SHAPE,
    as_llama,
    as_llama_with_a_window,
    as_qwen2,
    changed,
)
from tests.support.models.generated_nvfp4 import write_checkpoint
from tests.support.paths import IN_VLLM
from tests.support.servers.serving import clean_environ

pytestmark = [pytest.mark.vllm, pytest.mark.when_changed(*OPERATORS)]
# Two ways to round the same sums to BF16, at logits of about 10; FP4 codes may fall either way.
DIFFERENCE, DIFFERENCE_W4A4 = 0.15, 0.8


def compared(installed: Path, folder: Path, *words: str) -> list[str]:
    """A line of JSON for each model."""
    environ = clean_environ(folder, VLLM_ENABLE_V1_MULTIPROCESSING="0", PYTHONPATH=str(installed))
    command = [sys.executable, str(IN_VLLM / "decoder_in_vllm.py"), *words]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == sum(word != "--amx" for word in words), (
        done.stdout[-3000:] + done.stderr[-5000:]
    )
    return [line.removeprefix("RESULT ") for line in lines]


def test_operators_answer_as_the_modules(installed: Path, tmp_path: Path) -> None:
    models = {
        "qwen3": write_checkpoint(tmp_path / "qwen3", SHAPE, "modelopt"),
        "qwen3 w4a4": write_checkpoint(tmp_path / "w4a4", SHAPE, "compressed-tensors", w4a4=True),
        "llama": changed(tmp_path / "llama", as_llama),
        "window": changed(tmp_path / "window", as_llama_with_a_window),
        "qwen2": changed(tmp_path / "qwen2", as_qwen2),
    }
    lines = compared(installed, tmp_path, *map(str, models.values()))
    for name, line in zip(models, lines, strict=True):
        found = json.loads(line)
        most = DIFFERENCE_W4A4 if "w4a4" in name else DIFFERENCE
        assert found["whole_steps"] >= TOKENS - 1, (name, found)
        assert found["largest"] < most and found["same_tokens"] >= 3, (name, found)


def test_processors_with_amx_get_the_cache_that_operators_read(
    installed: Path, tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path / "qwen3", SHAPE, "modelopt")
    (line,) = compared(installed, tmp_path, "--amx", str(model))
    found = json.loads(line)
    assert found["whole_steps"] >= TOKENS - 1 and found["largest"] < DIFFERENCE, found

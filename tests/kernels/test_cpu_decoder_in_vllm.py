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
from tests.support.paths import IN_VLLM, ROOT, python_path
from tests.support.servers.serving import clean_environ

pytestmark = [pytest.mark.vllm, pytest.mark.when_changed(*OPERATORS)]
# Two ways to round the same sums to BF16, at logits of about 10; FP4 codes may fall either way.
DIFFERENCE, DIFFERENCE_W4A4 = 0.15, 0.8


def compared(
    installed: Path, folder: Path, *words: str, program: str = "decoder_in_vllm.py"
) -> list[str]:
    """The program's lines of JSON."""
    environ = clean_environ(
        folder, VLLM_ENABLE_V1_MULTIPROCESSING="0", PYTHONPATH=python_path(installed, ROOT)
    )
    command = [sys.executable, str(IN_VLLM / program), *words]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
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
        assert found["whole_steps"] >= TOKENS, (name, found)  # the prompt's too
        assert found["largest"] < most and found["same_tokens"] >= 3, (name, found)


def test_long_prompts_keep_vllms_attention_where_it_multiplies_in_bf16() -> None:
    from nibble.engine.plugin.cpu_decoder import MOST_ATTENDED_TOKENS, attend

    assert attend(1, 100_000, has_avx512=True)
    assert attend(MOST_ATTENDED_TOKENS, MOST_ATTENDED_TOKENS, has_avx512=True)
    assert not attend(2, MOST_ATTENDED_TOKENS + 1, has_avx512=True)
    assert attend(5000, 100_000, has_avx512=False)


def test_processors_with_amx_get_the_cache_that_operators_read(
    installed: Path, tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path / "qwen3", SHAPE, "modelopt")
    (line,) = compared(installed, tmp_path, "--amx", str(model))
    found = json.loads(line)
    assert found["whole_steps"] >= TOKENS and found["largest"] < DIFFERENCE, found


def test_steps_that_nibble_prepares_answer_with_the_bits_of_those_that_vllm_prepares(
    installed: Path, tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path / "qwen3", SHAPE, "modelopt")
    lines = compared(installed, tmp_path, str(model), program="steps_in_vllm.py")
    found = [json.loads(line) for line in lines]
    assert len(found) == 24
    alone = ("greedy", "top-k", "greedy and top-k", "log-probs of prompts")
    at_times = ("one without top-k", "minimum of tokens")
    for each in found:
        assert each["equal"], found
        if each["sampling"] in at_times:
            assert 0 < each["leading"] < each["prepared"], each
        else:
            assert each["leading"] == (each["prepared"] if each["sampling"] in alone else 0), each
        # Steps with a new prompt are vLLM's, and those with prompts whose log-probs are wanted.
        if each["sampling"] == "log-probs of prompts" and each["piece"] == 1:
            assert 0 < each["prepared"] < each["steps"] / 2, found
        else:
            assert each["steps"] > each["prepared"] >= each["steps"] - 5, found

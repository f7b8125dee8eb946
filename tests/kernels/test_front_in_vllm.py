"""nibble's kernel before attention in a real vLLM on its CPU platform, where FlashAttention's
layers and the kernel's operator are plain torch code.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.test_cpu_decoder_in_vllm import as_llama_with_a_window
from tests.kernels.test_cpu_decoder_in_vllm import changed as changed_model
from tests.support.changes import OPERATORS
from tests.support.in_vllm.front_in_vllm import TOKENS
from tests.support.models.generated_nvfp4 import Shape, write_checkpoint
from tests.support.paths import IN_VLLM, ROOT, python_path
from tests.support.servers.serving import clean_environ
from tests.support.vllm_plugins import paged_on_the_cpu
from tests.support.vllm_plugins.install import install

pytestmark = [pytest.mark.vllm, pytest.mark.when_changed(*OPERATORS)]
SHAPE = Shape(head_dim=64)
# The plugin's norms and RoPE round as vLLM's kernels for CUDA; vLLM's compiled code rounds less
# often, and with an FP8 cache a rounding may fall either way.
EQUAL, ROUNDED = 0.02, 0.5


def test_answers_are_those_of_vllms_code_and_the_canary_sees_the_kernel(
    installed: Path, tmp_path: Path
) -> None:
    """Prompts in chunks, beside decode steps and with a prefix that is cached."""
    qwen = str(write_checkpoint(tmp_path / "qwen3", SHAPE, "modelopt"))
    jobs: dict[str, tuple[str, dict[str, Any], float]] = {
        "qwen3": (qwen, {}, EQUAL),
        "fp8": (qwen, {"kv_cache_dtype": "fp8"}, ROUNDED),
        "compiled": (qwen, {"enforce_eager": False}, ROUNDED),
        "window": (str(changed_model(tmp_path / "llama", as_llama_with_a_window)), {}, EQUAL),
        "experts": (
            str(write_checkpoint(tmp_path / "moe", Shape(head_dim=64, experts=4), "modelopt")),
            {},
            EQUAL,
        ),
    }
    for name, found in run(installed, tmp_path, jobs).items():
        most, on, off = jobs[name][2], found["on"], found["off"]
        if name == "window":  # its heads have 32 elements
            assert (on["modules"], on["calls"]) == (0, 0), (name, found)
            continue
        assert (on["modules"], off["modules"], off["calls"]) == (SHAPE.layers, 0, 0), (name, found)
        assert on["calls"] > SHAPE.layers * TOKENS, (name, found)
        assert found["largest"] < most, (name, found)
        assert all(same >= 3 for same in found["same_tokens"]), (name, found)
        (kind,), (other,) = on["checks"], off["checks"]
        assert "front" in kind and "front" not in other
        assert not any([*on["checks"][kind], *off["checks"][other]]), (name, found)
        assert all("off by" in problem for problem in on["checks_of_a_fault"][kind]), (name, found)


def run(installed: Path, here: Path, jobs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    install(here, paged_on_the_cpu)
    environ = clean_environ(
        here,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        PYTHONPATH=python_path(here, installed, ROOT),
        PAGED="1",
    )
    done = subprocess.run(
        [sys.executable, str(IN_VLLM / "front_in_vllm.py")],
        input=json.dumps([job[:2] for job in jobs.values()]),
        env=environ, capture_output=True, text=True, timeout=900, check=False, cwd=here,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == len(jobs), done.stdout[-3000:] + done.stderr[-5000:]
    found = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    return dict(zip(jobs, found, strict=True))

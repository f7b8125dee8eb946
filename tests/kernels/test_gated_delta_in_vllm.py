"""nibble's kernels for linear attention in a real vLLM on its CPU platform, where their operators
are plain torch code.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.changes import OPERATORS
from tests.support.in_vllm.gated_delta_in_vllm import TOKENS
from tests.support.models.generated_hybrid import SMALL
from tests.support.models.generated_nvfp4 import write_checkpoint
from tests.support.paths import IN_VLLM, ROOT, python_path
from tests.support.servers.serving import clean_environ

pytestmark = [pytest.mark.vllm, pytest.mark.when_changed(*OPERATORS)]
# Each token takes all experts, so that no rounding changes which.
LAYERS = SMALL.layer_types.count("linear_attention")
JOBS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "vLLM's prompts": {"most_tokens": 0},
    "compiled": {"enforce_eager": False},
}
# Of a log-probability. vLLM's kernels for the CPU round elsewhere.
ROUNDED = 0.2
ALIKE = 8  # tokens of each answer


def test_answers_are_those_of_vllms_code_and_the_canary_sees_the_kernels(
    installed: Path, tmp_path: Path
) -> None:
    """Prompts in chunks, beside decode steps and alone."""
    model = str(write_checkpoint(tmp_path / "model", SMALL, "modelopt"))
    for name, found in run(installed, tmp_path, model).items():
        on, off = found["on"], found["off"]
        assert (on["layers"], off["layers"], off["calls"]) == (LAYERS, 0, {}), (name, found)
        assert on["calls"]["gated_delta_step"] > LAYERS * (TOKENS - 4), (name, found)
        takes_prompts = JOBS[name].get("most_tokens") != 0
        assert ("gated_delta_prompts" in on["calls"]) == takes_prompts, (name, found)
        assert found["largest"] < ROUNDED, (name, found)
        assert all(same >= ALIKE for same in found["same_tokens"]), (name, found)
        assert on["follows"], (name, found)
        right, doubled = on["checks"][:LAYERS], on["checks"][LAYERS:]
        assert right == [["", ""]] * LAYERS, (name, found)
        assert all(step == "" and "off by 1" in prompts for step, prompts in doubled), (name, found)


def run(installed: Path, here: Path, model: str) -> dict[str, dict[str, Any]]:
    environ = clean_environ(
        here,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        PYTHONPATH=python_path(installed, ROOT),
    )
    done = subprocess.run(
        [sys.executable, str(IN_VLLM / "gated_delta_in_vllm.py")],
        input=json.dumps([[model, options] for options in JOBS.values()]),
        env=environ, capture_output=True, text=True, timeout=900, check=False, cwd=here,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == len(JOBS), done.stdout[-3000:] + done.stderr[-5000:]
    found = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    return dict(zip(JOBS, found, strict=True))

"""A shared expert in the launch of the routed ones, in a real vLLM on its CPU platform, where the
kernel of experts is its specification.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.test_gpu_kernel_in_vllm import (
    BF16_ROUNDING,
    OPTIONS,
    PROMPT,
    anywhere,
    largest_difference,
    routed_answers,
)
from tests.kernels.test_gpu_kernel_in_vllm import OURS as EXPERTS
from tests.support.changes import OPERATORS
from tests.support.in_vllm import vllm_logprobs
from tests.support.models.generated_hybrid import HybridShape
from tests.support.models.generated_nvfp4 import write_checkpoint
from tests.support.paths import IN_VLLM, ROOT, python_path
from tests.support.servers.serving import clean_environ

pytestmark = [pytest.mark.vllm, pytest.mark.when_changed(*OPERATORS)]
OURS = {"additional_config": {"nibble": EXPERTS | {"shared_expert": "on"}}}
SHAPE = HybridShape(layers=4, experts=8, chosen=3, linear_heads=2, linear_head_dim=128)


def test_answers_are_those_of_a_shared_expert_beside_the_routed_ones(
    installed: Path, tmp_path: Path
) -> None:
    """Few tokens and many, of both forms of checkpoints, compiled too."""
    folders = [
        str(write_checkpoint(tmp_path / form, SHAPE, form))
        for form in ("modelopt", "compressed-tensors")
    ]
    jobs: list[vllm_logprobs.Job] = [
        (folder, OPTIONS | OURS | {"enforce_eager": True}, prompt)
        for folder in folders
        for prompt in (PROMPT, PROMPT * 13)
    ]
    expected, found = routed_answers(installed, tmp_path / "all", "all", jobs)
    assert all("joins_shared" not in counts for counts in found)
    compiled: vllm_logprobs.Job = (folders[0], OPTIONS | OURS, PROMPT)
    jobs.append(compiled)
    answers, found = routed_answers(installed, tmp_path / "joined", "joined", jobs)
    assert [counts["joins_shared"] for counts in found] == [SHAPE.layers] * len(jobs), found
    for one, other in zip(answers, [*expected, expected[0]], strict=True):
        assert largest_difference(one, other) < BF16_ROUNDING


def test_it_stays_beside_them_unless_the_option_is_on(installed: Path, tmp_path: Path) -> None:
    folder = str(write_checkpoint(tmp_path / "model", SHAPE, "modelopt"))
    off = {"additional_config": {"nibble": EXPERTS}, "enforce_eager": True}
    _, (counts,) = routed_answers(
        installed, tmp_path / "joined", "joined", [(folder, OPTIONS | off, PROMPT)]
    )
    assert counts["scales_shared"] == SHAPE.layers and "joins_shared" not in counts


def test_a_shared_expert_of_another_size_stays_beside_the_routed_ones(
    installed: Path, tmp_path: Path
) -> None:
    shape = HybridShape(
        layers=4, experts=8, chosen=3, linear_heads=2, linear_head_dim=128, shared_factor=2
    )
    folder = str(write_checkpoint(tmp_path / "model", shape, "modelopt"))
    jobs: list[vllm_logprobs.Job] = [(folder, OPTIONS | OURS | {"enforce_eager": True}, PROMPT)]
    _, (counts,) = routed_answers(installed, tmp_path / "joined", "joined", jobs)
    assert counts["scales_shared"] == shape.layers and "joins_shared" not in counts


def test_the_canary_sees_a_wrong_shared_expert_and_loaded_scales_are_taken_again(
    installed: Path, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "model", SHAPE, "modelopt")
    options: dict[str, Any] = OPTIONS | OURS | {"enforce_eager": True}
    environ = anywhere(installed, tmp_path)
    environ["PYTHONPATH"] = python_path(tmp_path, installed, ROOT)
    done = subprocess.run(
        [sys.executable, str(IN_VLLM / "shared_expert_in_vllm.py"), folder, json.dumps(options)],
        env=clean_environ(
            tmp_path, VLLM_ENABLE_V1_MULTIPROCESSING="0", OUR_EXPERTS="joined", **environ
        ),
        capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path,
    )  # fmt: skip
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")] or [""]
    assert line, done.stdout[-3000:] + done.stderr[-3000:]
    layers = json.loads(line.removeprefix("RESULT "))
    assert len(layers) == SHAPE.layers
    for right, doubled, followed in layers:
        assert right == followed == ["", ""]
        assert all("off by" in problem for problem in doubled), doubled

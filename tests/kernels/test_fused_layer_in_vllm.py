"""Fused layers with unequal global scales, in vLLM's layer classes: what vLLM alone makes of them,
and what the plugin does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.changes import OPERATORS
from tests.support.paths import ROOT, python_path

pytestmark = [pytest.mark.vllm, pytest.mark.when_changed(*OPERATORS)]
PROGRAM = ROOT / "benchmarks/nvfp4_layers.py"
BF16_ROUNDING = 0.004  # two roundings of an output to BF16
FORMS = ("modelopt", "compressed-tensors")
# activations and kernel -> relative error of each part to the weights before they were quantized
PATHS = {
    ("fp4", "auto"): 0.134,
    ("fp4", "emulation"): 0.134,
    ("bf16", "auto"): 0.095,
    ("fp4-as-bf16", "auto"): 0.095,  # NIBBLE_NVFP4_ACTIVATIONS=bf16
}
Errors = dict[
    str, dict[str, float]
]  # of q, k and v to the "original" weights and to the "stored" ones


def run_program(installed: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = python_path(installed)
    environ = os.environ | {"PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, str(PROGRAM), *words],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


def errors(
    installed: Path, scales: str, paths: list[tuple[str, str]], device: str = "cpu"
) -> dict[tuple[str, str, str], Errors]:
    """For each form and path, in one process: the plugin is in all of it or in nothing of it."""
    cases = [(form, *path) for form in FORMS for path in paths]
    words = ("--device", device, "--cases", *(",".join([*case, scales]) for case in cases))
    done = run_program(installed, *words)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(cases), done.stderr[-2000:]
    return {case: json.loads(line)["errors"] for case, line in zip(cases, lines, strict=True)}


@pytest.fixture(scope="module")
def merged(installed: Path) -> dict[tuple[str, str, str], Errors]:
    return errors(installed, "merged", list(PATHS))


def test_vllm_alone_multiplies_parts_by_the_ratio_of_their_scales(installed: Path) -> None:
    found = errors(installed, "own", [("fp4", "emulation")])
    gains = {"modelopt": {"q": 1.288, "v": 0.954}, "compressed-tensors": {"k": 0.566, "v": 0.170}}
    for form, parts in gains.items():
        for part, gain in parts.items():
            error = found[form, "fp4", "emulation"][part]["original"]
            assert error == pytest.approx(gain, rel=0.15), (form, part)  # W4A4 adds its own error


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", PATHS, ids="-".join)
def test_the_plugin_leaves_each_part_its_own_scale(
    form: str, path: tuple[str, str], merged: dict[tuple[str, str, str], Errors]
) -> None:
    found = merged[form, *path]
    for part in ("q", "k", "v"):
        assert found[part]["stored"] < BF16_ROUNDING, found
        assert found[part]["original"] == pytest.approx(PATHS[path], rel=0.06), found


def test_nibbles_gpu_kernel_is_refused_where_it_cannot_run(installed: Path) -> None:
    done = run_program(installed, "--cases", "modelopt,fp4,nibble,merged")
    assert done.returncode
    assert "ValueError: nibble's NVFP4 kernel cannot run: it needs an NVIDIA GPU" in done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("activations", ["fp4", "bf16", "fp4-as-bf16"])
def test_nibbles_gpu_kernel_leaves_each_part_its_own_scale(
    installed: Path, activations: str
) -> None:
    """Activations stay in BF16 on a GPU that cannot multiply FP4."""
    for found in errors(installed, "merged", [(activations, "nibble")], "cuda").values():
        assert all(found[part]["stored"] < BF16_ROUNDING for part in ("q", "k", "v")), found

"""formats.md 5.2 through vLLM's own layer classes: what vLLM alone makes of unequal global scales, and what the plugin does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm
PROGRAM = Path(__file__).parents[2] / "benchmarks/nvfp4_layers.py"
BF16_ROUNDING = 0.004  # two roundings of an output to BF16


def errors(installed: Path, *case: str) -> dict[str, dict[str, float]]:
    """q, k and v: relative errors to the original weights and to the stored ones."""
    words = [sys.executable, str(PROGRAM), "--case", ",".join(case)]
    done = subprocess.run(
        words, env=os.environ | {"PYTHONPATH": str(installed)}, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-2000:]
    return json.loads(lines[-1])["errors"]


@pytest.mark.parametrize(
    ("form", "gains"),
    [("modelopt", {"q": 1.288, "v": 0.954}), ("compressed-tensors", {"k": 0.566, "v": 0.170})],
)
def test_vllm_alone_multiplies_parts_by_the_ratio_of_their_scales(
    installed: Path, form: str, gains: dict[str, float]
) -> None:
    found = errors(installed, form, "fp4", "emulation", "own")
    for part, gain in gains.items():
        assert found[part]["original"] == pytest.approx(gain, rel=0.15), found  # W4A4 adds its own error


@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize(
    ("activations", "kernel", "error"),
    [
        ("fp4", "auto", 0.134),
        ("fp4", "emulation", 0.134),
        ("bf16", "auto", 0.095),
        ("fp4-as-bf16", "auto", 0.095),  # NIBBLE_NVFP4_ACTIVATIONS=bf16
    ],
)
def test_the_plugin_leaves_each_part_its_own_scale(
    installed: Path, form: str, activations: str, kernel: str, error: float
) -> None:
    found = errors(installed, form, activations, kernel, "merged")
    for part in ("q", "k", "v"):
        assert found[part]["stored"] < BF16_ROUNDING, found
        assert found[part]["original"] == pytest.approx(error, rel=0.06), found

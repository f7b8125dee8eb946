"""On a machine with a supported GPU: run there, deselected elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nibble.machine.paths import root

pytestmark = pytest.mark.gpu


def test_the_demo_is_served_on_the_gpu_and_every_answer_is_right(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    subprocess.run(
        [sys.executable, "benchmarks/serve_demo.py", "--starts", "1", "--out", str(result)],
        cwd=root(),
        check=True,
        timeout=900,
    )
    data = json.loads(result.read_text())
    assert data["target"] != "cpu" and data["exact"] == data["questions"]

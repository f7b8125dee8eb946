"""What an NVFP4 model occupies when vLLM has loaded it on the CPU: no BF16 copy of its weights,
at any time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models.generated_nvfp4 import Shape, write_checkpoint
from tests.support.paths import ROOT
from tests.support.servers.serving import clean_environ

# 189 M elements in linear layers: 377 MB in BF16, 106 MB in NVFP4.
SHAPE = Shape(
    hidden=2048, intermediate=8192, layers=3, heads=16, kv_heads=8, head_dim=128, vocabulary=2048
)
PROGRAM = ROOT / "benchmarks/cpu_nvfp4.py"


@pytest.mark.slow
@pytest.mark.vllm
def test_packed_layers_and_the_peak_of_loading_stay_small(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", SHAPE, "modelopt", w4a4=True)
    environ = clean_environ(tmp_path, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    done = subprocess.run(
        [sys.executable, PROGRAM, "--serve", folder],
        env=environ,
        text=True,
        capture_output=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout.rpartition("RESULT ")[2])
    file_bytes = (folder / "model.safetensors").stat().st_size
    assert found["linear_bytes"] <= 0.30 * 2 * SHAPE.linear_elements()
    assert found["peak_rss_loaded"] <= file_bytes + 1.0e9
    # The bound above leaves room for the libraries; a BF16 copy would have to fit in what loading
    # adds to them.
    assert found["peak_anonymous_loaded"] - found["anonymous_of_imports"] < file_bytes + 250e6

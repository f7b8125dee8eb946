"""nibble.engine.start_vllm with a stand-in for vLLM: what vLLM's command line gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nibble.engine.process import child_command
from tests.support.paths import ROOT

MAIN = """
import gc, importlib, json, sys
def main():
    try:
        importlib.import_module("ray"); ray = True
    except ImportError:
        ray = False
    print(json.dumps({"argv": sys.argv[1:], "collects": gc.isenabled(), "ray": ray,
                      "frozen": gc.get_freeze_count() > 0, "seen": sys.modules["vllm"].seen}))
"""
SEEN = "import gc, vllm; vllm.seen.append((__name__, gc.isenabled()))\n"
SERVE, ENGINE = "vllm.entrypoints.cli.serve", "vllm.v1.engine.core"
CPU_WORKER = "vllm.v1.worker.cpu_worker"
PLATFORM = """
import os
class current_platform:
    is_cpu = staticmethod(lambda: os.environ["PLATFORM"] == "cpu")
"""


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """Without most of the modules that are imported early: what needs one reports it."""
    for path, text in {
        "vllm/__init__.py": "seen = []\n",
        "vllm/entrypoints/__init__.py": "",
        "vllm/entrypoints/cli/__init__.py": "",
        "vllm/entrypoints/cli/main.py": MAIN,
        "vllm/entrypoints/cli/serve.py": SEEN,
        "vllm/v1/__init__.py": "",
        "vllm/v1/engine/__init__.py": "",
        "vllm/v1/engine/core.py": SEEN,
        "vllm/v1/worker/__init__.py": "",
        "vllm/v1/worker/cpu_worker.py": SEEN,
        "vllm/platforms.py": PLATFORM,
        "ray.py": "",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "method", "platform", "imported", "ray"),
    [
        (["serve", "m"], "fork", "cpu", [SERVE, CPU_WORKER, ENGINE], False),
        # The CPU's worker replaces torch.cuda's streams: on a GPU it is not imported.
        (["serve", "m"], "fork", "cuda", [SERVE, ENGINE], False),
        (["serve", "m", "--data-parallel-backend", "ray"], "fork", "cuda", [SERVE, ENGINE], True),
        (["serve", "m", "--port", "1"], "spawn", "cpu", [SERVE], True),
        (["serve", "m"], "", "cuda", [SERVE], True),
    ],
)
def test_imports_run_without_the_collector_and_vllm_with_it(
    vllm: Path, words: list[str], method: str, platform: str, imported: list[str], ray: bool
) -> None:
    environ = {**os.environ, "VLLM_WORKER_MULTIPROC_METHOD": method, "PLATFORM": platform}
    environ["PYTHONPATH"] = os.pathsep.join([str(vllm), str(ROOT)])
    done = subprocess.run(
        child_command(words), env=environ, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    seen = [[name, False] for name in imported]
    assert found == {"argv": words, "collects": True, "frozen": True, "ray": ray, "seen": seen}


def test_it_runs_in_nibbles_own_interpreter() -> None:
    assert child_command(["serve"])[0] == sys.executable

"""nibble_kernels is a library for anyone with torch: neither nibble nor vLLM is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kernels.kernel_build import KERNELS

# Found by no import, wherever they are installed.
ALONE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("nibble", "vllm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""
EVERYTHING = """
import importlib, pkgutil
import nibble_kernels
names = [one.name for one in pkgutil.walk_packages(nibble_kernels.__path__, "nibble_kernels.")]
for name in names:
    if not name.endswith(("._cpu", "._cuda")):
        importlib.import_module(name)
assert not {name.partition(".")[0] for name in sys.modules} & {"nibble", "vllm"}
import torch
for name in ("nvfp4_quant", "quant_fp4", "nvfp4_linear", "nvfp4_moe"):  # compiled, in each folder
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"nibble::{name}", "CPU"), name
print(len(names), nibble_kernels.implementations()["cpu"])
"""


def run(program: str, packages: Path) -> str:
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(packages)}
    done = subprocess.run(
        [sys.executable, "-c", ALONE + program],
        capture_output=True,
        text=True,
        check=False,
        env=environ,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def examples() -> list[tuple[str, str]]:
    """Each Python example of README.md and the output that it shows."""
    text = (KERNELS / "README.md").read_text()
    return re.findall(r"```python\n(.*?)```\n+```\n(.*?)```", text, re.DOTALL)


def test_every_module_imports_where_neither_vllm_nor_nibble_is_installed(installed: Path) -> None:
    count, state = run(EVERYTHING, installed).split(maxsplit=1)
    assert int(count) > 20 and state == "compiled\n"


@pytest.mark.parametrize("where", ["compiled", "sources"])
def test_the_readmes_example_runs_and_prints_what_it_says(where: str, installed: Path) -> None:
    ((program, output),) = examples()
    packages = installed if where == "compiled" else KERNELS / "src"
    assert run(program, packages) == output

"""The CPU's kernels for any processor, compiled for Arm and run by QEMU: the same bytes as here.

Here they are compared with the specification (test_nvfp4_linear.py); equal bytes carry that over.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.changes import OPERATORS
from tests.support.kernels.kernel_build import KERNELS

PROGRAM = Path(__file__).with_name("portable_products.cpp")
SOURCES = KERNELS / "src/nibble_kernels"
ARM = "aarch64-linux-gnu-g++"
QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")

pytestmark = [
    pytest.mark.skipif(not (shutil.which(ARM) and QEMU), reason=f"no {ARM} or no qemu-aarch64"),
    pytest.mark.when_changed(*OPERATORS),
]


def digests(compiler: str, folder: Path, *runner: str) -> list[str]:
    """Lines of the program, built with the flags of the wheel."""
    flags = re.search(
        r"^CXX_FLAGS = (\[.*?\])$", (KERNELS / "setup.py").read_text(), re.MULTILINE | re.DOTALL
    )
    assert flags
    program = folder / f"{compiler}.out"
    includes = [f"-I{SOURCES}", f"-I{SOURCES / 'include'}"]
    words = [compiler, *ast.literal_eval(flags[1]), "-static", *includes, "-o", program, PROGRAM]
    subprocess.run(words, check=True)
    done = subprocess.run([*runner, program], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_arm_computes_the_same_bytes(tmp_path: Path) -> None:
    here = digests("g++", tmp_path)
    assert QEMU and len(here) == 2 + 3 * 2
    for cpu in ("cortex-a57", "max"):  # the least that torch runs on, and one with SVE
        assert digests(ARM, tmp_path, QEMU, "-cpu", cpu) == here

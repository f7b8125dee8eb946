"""Kernels' own sources compiled by g++ for the host, where lanes take turns
(tests/kernels/emulator).
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
from torch import Tensor

from tests.support.kernels.kernel_build import KERNELS
from tests.support.paths import ROOT

EMULATOR = ROOT / "tests/kernels/emulator"

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no g++ here")


def compile_on_the_host(source: str, folder: Path, *, e2m1: bool = False) -> ctypes.CDLL:
    """A library of a source in the emulator's folder. e2m1: with the instructions that convert."""
    library, sources = folder / f"{source}.so", KERNELS / "src/nibble_kernels"
    words = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", "-pthread"]
    words += ["-ffp-contract=off"]  # as setup.py compiles: a fused multiply-add is written as one
    words += [f"-DEMULATE_E2M1_INSTRUCTIONS={int(e2m1)}"]
    words += [f"-I{path}" for path in (EMULATOR, sources, sources / "include")]
    subprocess.run([*words, "-o", str(library), str(EMULATOR / source)], check=True)
    return ctypes.CDLL(str(library))


def pointers(*tensors: Tensor | None) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(one.data_ptr() if one is not None else None) for one in tensors]

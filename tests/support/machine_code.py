"""The machine code of functions in nibble_kernels' CPU library, read with binutils."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import nibble_kernels
import pytest

needs_disassembler = pytest.mark.skipif(
    platform.machine() != "x86_64" or not (shutil.which("nm") and shutil.which("objdump")),
    reason="needs x86-64 and binutils",
)


def vector_instructions(symbol: str) -> list[list[str]]:
    """The lines with a vector register of each function whose mangled name matches `symbol`."""
    library = next(Path(nibble_kernels.__file__).parent.glob("_cpu*.so"))
    symbols = subprocess.run(["nm", "-S", library], capture_output=True, text=True, check=True)
    functions = []
    for numbers in re.findall(rf"^(\w+) (\w+) \w {symbol}$", symbols.stdout, re.MULTILINE):
        start, size = (int(number, 16) for number in numbers)
        words = ["objdump", "-d", f"--start-address={start}", f"--stop-address={start + size}"]
        code = subprocess.run([*words, library], capture_output=True, text=True, check=True).stdout
        functions.append([line for line in code.splitlines() if re.search(r"%[xyz]mm\d", line)])
    return functions


def on_the_stack(lines: list[str]) -> list[str]:
    return [line for line in lines if re.search(r"\(%r[sb]p", line)]

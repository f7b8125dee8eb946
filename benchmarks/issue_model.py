"""Instructions of the Blackwell kernels' loops against what a GPU can issue while it reads the
weight: a prediction, from machine code alone.

    python benchmarks/issue_model.py

Compiles for 120f, so it needs nvcc; NVIDIA's disassembler is fetched once. A loop's warp reads some
bytes of the weight with some instructions and tensor core products. A GPU has four schedulers a
multiprocessor, one instruction a cycle each; cycles of a product follow from its peak rate.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests/kernels"))

from test_fp4_instructions import compile_source, sass_functions


class Gpu(NamedTuple):
    name: str
    multiprocessors: int
    hertz: float
    bytes_per_second: float  # reads, as others measured them
    fp4_per_second: float  # dense, by its data sheet


class Loop(NamedTuple):
    kernel: str
    source: str
    name: str  # a regular expression
    opcode: str
    weight_bytes: int  # that a warp reads in an iteration
    further: int  # instructions of the block for these bytes, outside of the loop


GPUS = (
    Gpu("GB10", 48, 2.4e9, 231e9, 500e12),
    Gpu("RTX PRO 6000", 188, 2.4e9, 1600e9, 2000e12),
)
SPARSE_X = 4 * 60  # a chunk's x is put in order by four warps' iterations of about 60
LOOPS = (
    *(
        Loop(
            f"W4A4, {n} tokens a tile",
            "nvfp4_linear/w4a4.cu",
            f"bfloat16.*FormILj{n}E",
            "OMMA",
            1152,
            0,
        )
        for n in (32, 64, 128)
    ),
    *(
        Loop(
            f"FP8{kind}, {8 * n} tokens",
            "fp8_linear/kernel.cu",
            f"bfloat16Lj{n}ELb{b}E",
            "QMMA",
            4096,
            0,
        )
        for b, kind in enumerate(("", " in blocks"))
        for n in (1, 2, 4)
    ),
    *(
        Loop(
            f"sparse, {8 * n} tokens",
            "nvfp4_sparse/kernel.cu",
            f"Bfloat.*Lj{n}E",
            "HMMA",
            896,
            n * SPARSE_X,
        )
        for n in (1, 2)
    ),
)


def instructions(body: str, opcode: str) -> tuple[int, int]:
    """Of the shortest loop with this opcode: instructions, and those with the opcode."""
    found = [(int(m[1], 16), m[2]) for m in re.finditer(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", body)]
    loops: list[tuple[int, int]] = []
    for place, text in found:
        branch = re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", text)
        if branch and int(branch[1], 16) < place:
            inside = [one for at, one in found if int(branch[1], 16) <= at <= place]
            loops.append((len(inside), sum(opcode in one for one in inside)))
    return min(loop for loop in loops if loop[1])


def main() -> None:
    kernels: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, source in enumerate({one.source for one in LOOPS}):
            scratch = Path(folder, str(number))
            scratch.mkdir()
            kernels[source] = dict(sass_functions(compile_source("120f", source, scratch)[1]))
    print("| loop | weight bytes | instructions | products |", *(f"{one.name} |" for one in GPUS))
    for loop in LOOPS:
        body = next(v for k, v in kernels[loop.source].items() if re.search(loop.name, k))
        count, products = instructions(body, loop.opcode)
        cells = [loop.kernel, loop.weight_bytes, count + loop.further, products]
        for gpu in GPUS:
            cycles = (
                gpu.multiprocessors * 4 * gpu.hertz / (gpu.bytes_per_second / loop.weight_bytes)
            )
            each = 16 * 8 * 64 * 2 / (gpu.fp4_per_second / (gpu.multiprocessors * 4 * gpu.hertz))
            needed = max(count + loop.further, products * each if loop.opcode == "OMMA" else 0)
            cells.append(f"{cycles / needed:.1f}")
        print("|", " | ".join(str(cell) for cell in cells), "|")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.cmd[0]} failed")

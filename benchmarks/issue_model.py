"""Instructions of the kernels' loops for SM12x against what a GPU can issue while it reads the
loop's bytes: a prediction, from machine code alone.

    python benchmarks/issue_model.py
    python benchmarks/issue_model.py --selftest report.json

Compiles for 120f, so it needs nvcc; NVIDIA's disassembler is fetched once. A loop's warp reads some
bytes with some instructions and tensor core products. A GPU has four schedulers a multiprocessor,
one instruction a cycle each; cycles of a product follow from its peak rate. With the report of
`nibble selftest --out` the GPU's own clock and read bandwidth replace the assumed ones, and the
decode kernel's measured speeds stand beside the prediction.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests/kernels"))

from nibble.trials.report import Report, gb_per_s, read_report


@dataclass(frozen=True)
class Gpu:
    """`fp4_per_second`: dense, by its data sheet."""

    name: str
    multiprocessors: int
    hertz: float
    bytes_per_second: float
    fp4_per_second: float

    @property
    def issued_per_second(self) -> float:
        return self.multiprocessors * 4 * self.hertz


@dataclass(frozen=True)
class Loop:
    """`name` is a regular expression for the mangled kernel. `nbytes` are read by a warp in an
    iteration, of the weight or of keys and values. `further` instructions of the block belong to
    these bytes and are not in the loop.
    """

    kernel: str
    source: str
    name: str
    opcode: str
    nbytes: int
    further: int = 0


# Reads are those that others measured (kernels' reference, 1.1).
GPUS = (
    Gpu("GB10", 48, 2.4e9, 231e9, 500e12),
    Gpu("RTX PRO 6000", 188, 2.4e9, 1600e9, 2000e12),
)
# Operations of an instruction, and its rate as a share of FP4's. With float32 sums the rates of
# GeForce cards: data sheets name twice as much for RTX PRO 6000.
PRODUCTS = {"OMMA": (16384, 1.0), "QMMA": (8192, 1 / 4), "HMMA": (4096, 1 / 8)}
TILE = 1152  # 16 rows by 128 columns of an NVFP4 weight with its scales
SPARSE_X = 4 * 60  # a chunk's x is put in order by four warps' iterations of about 60
NEEDED = 1.3  # what a loop should be able to issue, as a multiple of its bytes' time


def _decode(what: str, source: str, forms: tuple[int, ...]) -> tuple[Loop, ...]:
    return tuple(
        Loop(
            f"{what}, {8 * n} tokens{kind}",
            f"{source}/decode.cu",
            f"13__nv_bfloat16.*{operand}OperandE.*FormILb1ELj{n}E",
            "HMMA",
            TILE,
        )
        for operand, kind in (("Half", ""), ("Bfloat", ", BF16 products"))
        for n in forms
    )


LOOPS = (
    *_decode("W4A16", "nvfp4_linear", (1, 2, 4)),
    *_decode("experts", "nvfp4_moe", (1, 2)),
    *(
        Loop(
            f"E4M3 experts, {8 * n} tokens",
            "nvfp4_moe/decode.cu",
            f"E4m3OperandE.*FormILb1ELj{n}E",
            "HMMA",
            2056,  # a tile with its two scales
        )
        for n in (1, 2)
    ),
    *(
        Loop(
            f"W4A4, {n} tokens a tile",
            "nvfp4_linear/w4a4.cu",
            f"bfloat16.*FormILj{n}E",
            "OMMA",
            TILE,
        )
        for n in (32, 64, 128)
    ),
    *(
        Loop(
            f"W4A4 experts, {n} tokens a tile",
            "nvfp4_moe/w4a4.cu",
            f"8multiply.*bfloat16.*FormILj{n}E",
            "OMMA",
            TILE,
        )
        for n in (16, 32, 64, 128)
    ),
    *(
        Loop(
            f"FP8{kind}, {8 * n} tokens",
            "fp8_linear/kernel.cu",
            f"bfloat16Lj{n}ELb{b}E",
            "QMMA",
            4096,
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
    *(
        Loop(
            f"attention, {kind} keys of {dim}",
            "decode_attention/decode_attention.cu",
            f"FormILj{dim}ELb{int(kind == 'FP8')}ELj1ELb1E",
            "HMMA",
            32 * dim * (1 if kind == "FP8" else 2),  # 16 keys with their values
        )
        for dim in (64, 128, 256)
        for kind in ("BF16", "FP8")
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


def body_of(loop: Loop, kernels: Mapping[str, str]) -> str:
    """The kernel's machine code; `kernels` are those of the loop's source."""
    return next(body for name, body in kernels.items() if re.search(loop.name, name))


def margin(loop: Loop, gpu: Gpu, count: int, products: int) -> float:
    """How many times the loop could run while its bytes are read."""
    operations, share = PRODUCTS[loop.opcode]
    each = operations / (gpu.fp4_per_second * share / gpu.issued_per_second)
    needed = max(count + loop.further, products * each)
    return gpu.issued_per_second * loop.nbytes / gpu.bytes_per_second / needed


def measured_gpu(report: Report) -> Gpu:
    """The GPU of a report, with its own read bandwidth and clock."""
    assumed = next((gpu for gpu in GPUS if gpu.name in report.place.device), None)
    if assumed is None:
        known = ", ".join(gpu.name for gpu in GPUS)
        sys.exit(f"error: no model of {report.place.device}; expected: one of {known}")
    reads = [t.facts["read_gb_per_s"] for t in report.outcomes if "read_gb_per_s" in t.facts]
    clock = re.search(r"of (\d+) MHz", " ".join(report.states))
    return replace(
        assumed,
        hertz=int(clock[1]) * 1e6 if clock else assumed.hertz,
        bytes_per_second=reads[0] * 1e9 if reads else assumed.bytes_per_second,
    )


def print_measured(report: Report, gpu: Gpu) -> None:
    """The decode kernel's speed with one row: reads are its limit where the margin is above 1."""
    reads = gpu.bytes_per_second / 1e9
    print(f"\n{gpu.name}: reads {reads:.0f} GB/s at {gpu.hertz / 1e9:.2f} GHz")
    for outcome in report.outcomes:
        if outcome.name == "decode":
            for shape, speed in gb_per_s(outcome):
                print(f"W4A16 {shape}, 1 row: {speed:.0f} GB/s, {speed / reads:.0%} of the reads")


def main() -> None:
    from test_fp4_instructions import compile_source, sass_functions

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--selftest", type=Path, metavar="FILE", help="`nibble selftest --out`")
    path = parser.parse_args().selftest
    report = read_report(path)[0] if path else None
    gpus = (measured_gpu(report),) if report else GPUS
    kernels: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, source in enumerate({one.source for one in LOOPS}):
            scratch = Path(folder, str(number))
            scratch.mkdir()
            kernels[source] = dict(sass_functions(compile_source("120f", source, scratch)[1]))
    print("| loop | bytes | instructions | products |", *(f"{one.name} |" for one in gpus))
    print("|---|---|---|---|" + "---|" * len(gpus))
    for loop in LOOPS:
        count, products = instructions(body_of(loop, kernels[loop.source]), loop.opcode)
        cells = [loop.kernel, loop.nbytes, count + loop.further, products]
        cells += [f"{margin(loop, gpu, count, products):.1f}" for gpu in gpus]
        print("|", " | ".join(str(cell) for cell in cells), "|")
    if report:
        print_measured(report, gpus[0])


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.cmd[0]} failed")

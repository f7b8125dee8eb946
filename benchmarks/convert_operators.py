"""The compiled operators of a conversion beside what they replace, on one CPU thread.

    python benchmarks/convert_operators.py [--out benchmarks/results/convert_operators.json]

Weight quantization beside its specification in plain torch; llama.cpp's blocks to BF16 beside the
library gguf and torch. Both take turns; a figure is the median of ROUNDS, in nanoseconds a weight.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from machine import machine
from nibble_kernels import gguf_blocks, weight_quant

ROWS, COLUMNS, ROUNDS = 1024, 4096, 5
RESULT = Path(__file__).parent / "results" / "convert_operators.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULT)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    result = {
        "command": "python benchmarks/convert_operators.py",
        "machine": machine("gguf"),
        "ns_a_weight": {**quantization(), **blocks()},
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["ns_a_weight"], indent=1))


def quantization() -> dict[str, Any]:
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)).bfloat16()
    amax = weight.abs().amax().float()
    found = {}
    for name, four_over_six in (("round", False), ("four-over-six", True)):
        scale = weight_quant.quantize(weight, four_over_six=four_over_six).global_scale
        found[name] = compared(
            lambda flag=four_over_six: weight_quant.quantize(weight, four_over_six=flag),
            lambda flag=four_over_six, scale=scale: weight_quant.reference.quantize_weight(
                weight, amax, scale, flag
            ),
        )
    return found


def blocks() -> dict[str, Any]:
    random = numpy.random.default_rng(1)
    found = {}
    for kind, (elements, size) in gguf_blocks.BLOCKS.items():
        raw = random.integers(0, 256, (ROWS * COLUMNS // elements, size), dtype=numpy.uint8)
        raw[:, -2:] = raw[:, :4] = 0  # scales of zero: any byte would give infinities
        tensor = torch.from_numpy(raw)
        found[kind] = compared(
            lambda tensor=tensor, kind=kind: gguf_blocks.gguf_to_bfloat16(tensor, kind),
            lambda raw=raw, kind=kind: by_library(raw, kind),
        )
    return found


def by_library(raw: numpy.ndarray, kind: str) -> torch.Tensor:
    """In pieces that fit a core's cache, as one row."""
    piece = (1 << 17) // gguf_blocks.BLOCKS[kind][0]
    parts = [
        torch.from_numpy(
            dequantize(raw[at : at + piece].reshape(1, -1), GGMLQuantizationType[kind])
        ).bfloat16()
        for at in range(0, len(raw), piece)
    ]
    return torch.cat(parts, dim=1)


def compared(ours: Callable[[], Any], other: Callable[[], Any]) -> dict[str, float]:
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS + 1):
        for run, spent in zip((ours, other), times, strict=True):
            began = time.perf_counter()
            run()
            spent.append((time.perf_counter() - began) / (ROWS * COLUMNS) * 1e9)
    mine, theirs = (statistics.median(spent[1:]) for spent in times)
    return {
        "compiled": round(mine, 2),
        "replaced": round(theirs, 2),
        "times_faster": round(theirs / mine, 1),
    }


if __name__ == "__main__":
    main()

"""Milliseconds of the decoder operator's step on the CPU, beside another build of the kernels.

    pip install --no-deps --no-build-isolation --target FOLDER PATH/kernels
    python benchmarks/cpu_decoder_step.py --beside FOLDER [--shape 1.7b] [--level avx_vnni]
        [--rows 1 4] [--tokens 64 1024] [--prompts 256] [--rounds 5] [--steps 30] [--out FILE]

A shape of cpu_llama_models.py without its head: all layers with random weights, one new token for
each of `rows` sequences that have `tokens` tokens each; or a whole prompt of each length in
`--prompts`. Each round starts one process for each build, in turns. Each process times `--steps`
steps of every case. `ms` is the fastest of all rounds, because other programs only add time;
`ratio` is the other build's time to the installed one's. `equal` says whether both give the same
bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from cpu_llama_models import SHAPES
from machine import machine
from torch import Tensor

BLOCK = 32  # tokens of a cache block
INPUT_SCALE_INV = 200.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beside", type=Path, help="folder of the other build")
    parser.add_argument("--shape", choices=SHAPES, default="1.7b")
    parser.add_argument("--level", help="instructions of the products; default: the best")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--tokens", type=int, nargs="*", default=[64, 1024])
    parser.add_argument("--prompts", type=int, nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", action="store_true", help="this process alone, as JSON lines")
    options = parser.parse_args()
    cases = [
        {"form": form, **case}
        for form in ("w4a16", "w4a4")
        for case in (
            *({"rows": rows, "tokens": n} for rows in options.rows for n in options.tokens),
            *({"prompt": n} for n in options.prompts),
        )
    ]
    if options.one:
        return measure(cases, options)
    if options.beside is None:
        parser.error("--beside is missing")
    flags = f"--beside FOLDER --shape {options.shape}"
    flags += f" --level {options.level}" if options.level else ""
    for name in ("rows", "tokens", "prompts"):
        flags += " ".join([f" --{name}", *map(str, getattr(options, name))])
    flags += f" --rounds {options.rounds} --steps {options.steps}"
    found = {
        "command": f"python benchmarks/cpu_decoder_step.py {flags}",
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "rows": in_turns(cases, options),
    }
    text = json.dumps(found, indent=1) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


def in_turns(cases: list[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    runs: dict[str, list[list[dict[str, Any]]]] = {"installed": [], "beside": []}
    words = [sys.executable, *sys.argv, "--one"]
    for _ in range(options.rounds):
        for name in runs:
            path = {"PYTHONPATH": str(options.beside)} if name == "beside" else {}
            done = subprocess.run(
                words, env=os.environ | path, stdout=subprocess.PIPE, text=True, check=True
            )
            runs[name].append([json.loads(line) for line in done.stdout.splitlines()])
    rows = []
    for i, case in enumerate(cases):
        ms = {name: min(run[i]["ms"] for run in of) for name, of in runs.items()}
        digests = {run[i]["digest"] for of in runs.values() for run in of}
        ratio = round(ms["beside"] / ms["installed"], 2)
        rows.append(case | {"ms": ms, "ratio": ratio, "equal": len(digests) == 1})
    return rows


def measure(cases: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """A line of JSON for each case: the fastest step, and a digest of its result."""
    from nibble_kernels.nvfp4_linear import use_cpu_level

    for form in ("w4a16", "w4a4"):
        decoder, layers = decoder_of(form, options.shape)
        if options.level:
            use_cpu_level(options.level)
        for case in cases:
            if case["form"] != form:
                continue
            if "prompt" in case:
                run = stepper(decoder, layers, 1, case["prompt"], case["prompt"])
            else:
                run = stepper(decoder, layers, case["rows"], case["tokens"])
            times = []
            for _ in range(options.steps):
                began = time.perf_counter()
                result = run()
                times.append(time.perf_counter() - began)
            digest = hashlib.sha256(result.view(torch.uint8).numpy().tobytes()).hexdigest()[:12]
            print(json.dumps({"ms": round(min(times) * 1e3, 2), "digest": digest}), flush=True)


def decoder_of(form: str, name: str) -> tuple[Any, int]:
    """The decoder, and its number of layers, which have equal weights in memory of their own."""
    from nibble_kernels.activation_quant.reference import nvfp4_quant
    from nibble_kernels.decoder import Decoder, DecoderLayer, Product, Shape
    from nibble_kernels.nvfp4_linear.packed import pack_weight

    hidden, intermediate, layers, heads, kv_heads, size, _ = SHAPES[name]
    shape = Shape(hidden, intermediate, heads, kv_heads, size, 1e-6, size**-0.5)
    torch.manual_seed(0)
    quantized = []
    for rows, columns in (
        (shape.qkv_width, hidden),
        (hidden, heads * size),
        (2 * intermediate, hidden),
        (hidden, intermediate),
    ):
        weight = torch.randn(rows, columns) * columns**-0.5
        scale = 448 * 6 / weight.abs().max()
        quantized.append((*nvfp4_quant(weight, scale, tiled=False, exact=True), 1 / scale))
    input_scale_inv = torch.tensor(INPUT_SCALE_INV) if form == "w4a4" else None

    def layer() -> DecoderLayer:
        products = [
            Product(
                pack_weight(codes.clone(), scales.clone()), scale, input_scale_inv=input_scale_inv
            )
            for codes, scales, scale in quantized
        ]
        norms = [torch.ones(count).bfloat16() for count in (hidden, hidden, size, size)]
        return DecoderLayer(*products, *norms)

    angles = torch.rand(4096, size // 2) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).bfloat16()
    norm = torch.ones(hidden).bfloat16()
    return Decoder([layer() for _ in range(layers)], norm, cos_sin, shape), layers


def stepper(decoder: Any, layers: int, rows: int, tokens: int, new: int = 1) -> Any:
    """Computes one step of `rows` sequences, the same each time: their last `new` tokens."""
    shape = decoder.shape
    torch.manual_seed(1)
    each = -(-tokens // BLOCK)
    size = (rows * each, shape.keys, BLOCK, 2 * shape.head_size)
    caches = [torch.randn(size).bfloat16() for _ in range(layers)]
    blocks = torch.arange(rows * each, dtype=torch.int32).view(rows, each)
    own = torch.arange(tokens - new, tokens)
    slots = (blocks.long()[:, own // BLOCK] * BLOCK + own % BLOCK).flatten()
    lengths = torch.full((rows,), tokens, dtype=torch.int32)
    starts = torch.arange(0, rows * new + 1, new, dtype=torch.int32) if new > 1 else None
    positions = own.repeat(rows)
    embeddings = torch.randn(rows * new, shape.hidden).bfloat16()

    def run() -> Tensor:
        step = (embeddings.clone(), positions, caches, slots, blocks, lengths)
        return decoder.step(*step, starts=starts)

    return run


if __name__ == "__main__":
    main()

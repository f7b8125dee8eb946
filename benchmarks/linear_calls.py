"""Host time of a small model's layer: eager calls of its linear layers and norms on a GPU.

    python benchmarks/linear_calls.py --out FILE.json [--rows 1 64 300 800 1500 4096]

The layer has SmolLM2-135M's shape (hidden 576, intermediate 1536) without attention. A row has the
microseconds that the calls of a layer take on the host, and until the GPU has computed them. To
compare two builds, run it with each.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from machine import machine
from nibble_kernels.nvfp4_linear.gpu import nvfp4_weight_linear
from nibble_kernels.nvfp4_linear.weight import PreparedWeight, prepare_weight
from nibble_kernels.rms_norm import rms_norm
from torch import Tensor

HIDDEN, INTERMEDIATE, QKV = 576, 1536, 960
LAYERS, ROUNDS, GLOBAL_SCALE, EPSILON = 30, 10, 0.01, 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 300, 800, 1500, 4096])
    options = parser.parse_args()
    shapes = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    weights = [weight(*shape) for shape in shapes]
    rows = [measure(weights, count) for count in options.rows]
    if options.out:
        found = {"what": __doc__, "machine": machine(), "rows": rows}
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def weight(outputs: int, columns: int) -> PreparedWeight:
    codes = torch.randint(0, 256, (outputs, columns // 2), dtype=torch.uint8, device="cuda")
    scales = torch.rand(outputs, columns // 16, device="cuda").add_(0.5).to(torch.float8_e4m3fn)
    return prepare_weight(codes, scales, native=False)


def measure(weights: list[PreparedWeight], rows: int) -> dict[str, float]:
    qkv, output, gate_up, down = weights
    x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    norm = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)

    def layer(x: Tensor) -> Tensor:
        queries = nvfp4_weight_linear(rms_norm(x, norm, EPSILON), qkv, GLOBAL_SCALE)
        attended = queries[:, :HIDDEN].contiguous()
        x = nvfp4_weight_linear(attended, output, GLOBAL_SCALE, residual=x)
        between = rms_norm(x, norm, EPSILON)
        middle = nvfp4_weight_linear(between, gate_up, GLOBAL_SCALE, silu_mul=True)
        return nvfp4_weight_linear(middle, down, GLOBAL_SCALE, residual=x)

    host, whole = [], []
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(LAYERS):
            layer(x)
        host.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - began)
    found: dict[str, float] = {"rows": rows}
    for name, taken in (("host_us_a_layer", host), ("all_us_a_layer", whole)):
        found[name] = round(min(taken[1:]) / LAYERS * 1e6, 1)
    print(found, flush=True)
    return found


if __name__ == "__main__":
    main()

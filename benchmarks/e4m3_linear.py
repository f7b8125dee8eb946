"""A linear layer with an E4M3 weight and few rows: nibble's kernel, with activations in BF16,
beside vLLM's, which rounds activations to E4M3, and cuBLAS in BF16.

    python benchmarks/e4m3_linear.py --out FILE [--rows 1 4 8 16 32] [--divisions]

The layers are vLLM's of a ModelOpt checkpoint with FP8 weights, a scale for each weight and static
input scales. `vllm` is its layer with the kernel that quantizes x, `product` its product alone,
with x quantized before. Each implementation multiplies by several copies of the weight that
together fill the L2 cache four times, in one CUDA graph; the graphs replay alternately, and the
median counts. nibble and vLLM read the same tensors. `error` is |y - right| / |right| against
float64. The read bandwidth is torch.sum's over 2 GiB in the same run. --divisions measures every
way to divide the work of nibble's kernel instead.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import machine
from nibble_kernels.e4m3_linear import E4m3Scales, e4m3_decode_linear, prepare_e4m3_scales
from nvfp4_layers import distributed_environment, vllm_config
from nvfp4_linear import interleaved, read_bandwidth, runs
from torch import Tensor

SHAPES = {  # rows and columns
    "35b-a3b linear attention, in": (12288, 2048),
    "35b-a3b linear attention, out": (2048, 4096),
    "27b linear attention, in": (16384, 5120),
    "27b linear attention, out": (5120, 6144),
}
ROWS = (1, 4, 8, 16, 32)
DIVISIONS = [(), (1, 1), (2, 1), (4, 1)]
WEIGHT_SCALE, INPUT_SCALE = 1 / 4096, 4 / 448


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--divisions", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    with distributed_environment("cuda"), vllm_config("auto", {}):
        measure(options)


def measure(options: argparse.Namespace) -> None:
    read = read_bandwidth()
    results: list[dict[str, Any]] = []
    described = {
        "machine": machine(),
        "read_gb_per_s": round(read / 1e9),
        "command": sys.argv,
        "results": results,
    }
    print(f"{torch.cuda.get_device_name()}, reads {read / 1e9:.0f} GB/s", flush=True)
    for name, shape in SHAPES.items():
        layers = [Layer(shape) for _ in range(copies(shape))]
        for rows in options.rows:
            x = torch.randn(rows, shape[1], device="cuda", dtype=torch.bfloat16)
            found = divisions(layers, x) if options.divisions else side_by_side(layers, x)
            own = found["us"]["nibble"] / 1e6
            size = shape[0] * shape[1]
            results.append(
                {"layer": name, "n": shape[0], "k": shape[1], "rows": rows}
                | found
                | {"percent_of_read": round(100 * size / own / read, 1)}
            )
            print(json.dumps(results[-1]), flush=True)
            if options.out:  # after each row: a lent machine may go
                options.out.write_text(json.dumps(described, indent=1) + "\n")
        del layers
        torch.cuda.empty_cache()


def copies(shape: tuple[int, int]) -> int:
    """Weights that together fill the L2 cache four times."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, -(-4 * cache // (shape[0] * shape[1])))


class Layer:
    """vLLM's layer with random weights; nibble's scales of the same weight."""

    def __init__(self, shape: tuple[int, int]) -> None:
        from vllm.model_executor.layers.linear import ReplicatedLinear
        from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config

        config = ModelOptFp8Config("FP8", True, None, [])
        rows, columns = shape
        with torch.device("cuda"):
            layer: Any = ReplicatedLinear(
                columns, rows, bias=False, quant_config=config, prefix="linear"
            )
        values = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 64
        layer.weight.data.copy_(values.to(torch.float8_e4m3fn))
        layer.weight_scale.data.fill_(WEIGHT_SCALE)
        layer.input_scale.data.fill_(INPUT_SCALE)
        layer.quant_method.process_weights_after_loading(layer)
        self.layer, self.kernel = layer, layer.quant_method.kernel
        quantize = self.kernel.quant_fp8
        quantize._forward_method = quantize.forward_cuda  # else torch's operations, not compiled
        self.weight: Tensor = layer.weight.t()
        self.scales: E4m3Scales = prepare_e4m3_scales(self.weight, layer.weight_scale)

    def ours(self, x: Tensor, division: tuple[int, ...] = ()) -> Tensor:
        return e4m3_decode_linear(x, self.weight, self.scales, division=division)

    def theirs(self, x: Tensor) -> Tensor:
        return self.layer.quant_method.apply(self.layer, x)

    def product(self, quantized: Tensor, scale: Tensor) -> Tensor:
        return self.kernel.apply_scaled_mm(
            A=quantized,
            B=self.layer.weight,
            out_dtype=torch.bfloat16,
            As=scale,
            Bs=self.layer.weight_scale,
            bias=None,
            output_shape=[len(quantized), len(self.weight)],
        )

    def dense(self) -> Tensor:
        return (self.weight.float() * WEIGHT_SCALE).bfloat16()


def side_by_side(layers: list[Layer], x: Tensor) -> dict[str, Any]:
    """Errors and µs of each implementation, and ratios to nibble's."""
    first = layers[0]
    right = x.double() @ (first.weight.double() * WEIGHT_SCALE).T
    errors = {
        name: round(float((y.double() - right).norm() / right.norm()), 5)
        for name, y in {"nibble": first.ours(x), "vllm": first.theirs(x)}.items()
    }
    quantized = first.kernel.quant_fp8(x, first.layer.input_scale, None)
    dense = [layer.dense() for layer in layers[: max(2, len(layers) // 2)]]
    times = interleaved(
        {
            "nibble": [partial(layer.ours, x) for layer in layers],
            "vllm": [partial(layer.theirs, x) for layer in layers],
            "product": [partial(layer.product, *quantized) for layer in layers],
            "cublas bf16": [partial(torch.nn.functional.linear, x, one) for one in dense],
        }
    )
    own = times["nibble"]
    return {
        "kernel": type(first.kernel).__name__,
        "error": errors,
        "us": {name: round(time * 1e6, 2) for name, time in times.items()},
        "ratio": {name: round(time / own, 2) for name, time in times.items() if name != "nibble"},
    }


def divisions(layers: list[Layer], x: Tensor) -> dict[str, Any]:
    """µs with each division, and with the kernel's choice."""
    allowed = [each for each in DIVISIONS if runs(partial(layers[0].ours, division=each), x)]
    times = interleaved(
        {
            str(division) if division else "nibble": [
                partial(layer.ours, x, division) for layer in layers
            ]
            for division in allowed
        }
    )
    return {"us": {name: round(time * 1e6, 2) for name, time in times.items()}}


if __name__ == "__main__":
    main()

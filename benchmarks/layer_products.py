"""Time of a decoder layer's products and norms, with gaps between them and as a chain.

    python benchmarks/layer_products.py --out FILE [--shape 8b] [--rows 1 2 4 8 16 32 64 512]

A CUDA graph has the four products of LAYERS layers of a shape in SHAPES with different weights. A
copy of the queries, by torch, stands for attention. Ways, in turns:

apart    RMSNorm with the residual sum as torch.compile makes it, products without
chained  nibble::rms_norm, which lets its successor begin early, and residual sums in the products
fused    what serves: all between two attentions in one operator
products the products alone

The median of ROUNDS rounds counts. On a CPU the operators' specification runs, as a check.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from machine import machine
from nibble_kernels.nvfp4_linear.gpu import nvfp4_weight_linear
from nibble_kernels.nvfp4_linear.norm_linear import (
    LinearLayer,
    Norm,
    nvfp4_between_attentions,
    nvfp4_norm_linear,
    nvfp4_norm_mlp,
)
from nibble_kernels.nvfp4_linear.weight import PreparedWeight, prepare_weight
from nibble_kernels.rms_norm import rms_norm
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Shape(NamedTuple):
    """Sizes of a model's layers: hidden state, MLP, all queries and all keys."""

    hidden: int
    intermediate: int
    queries: int
    keys: int


SHAPES = {  # of Qwen3
    "0.6b": Shape(1024, 3072, 2048, 1024),
    "1.7b": Shape(2048, 6144, 2048, 1024),
    "4b": Shape(2560, 9728, 4096, 1024),
    "8b": Shape(4096, 12288, 4096, 1024),
    "14b": Shape(5120, 17408, 5120, 1024),
    "32b": Shape(5120, 25600, 8192, 1024),
    "tiny": Shape(256, 512, 256, 64),
}
LAYERS, ROUNDS = (12, 31) if DEVICE == "cuda" else (2, 1)
GLOBAL_SCALE, EPSILON = 0.01, 1e-6


class Layer(NamedTuple):
    """A layer's prepared weights and norms."""

    qkv: PreparedWeight
    output: PreparedWeight
    gate_up: PreparedWeight
    down: PreparedWeight
    first_norm: Norm
    second_norm: Norm


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 512])
    default = "8b" if DEVICE == "cuda" else "tiny"
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=[default])
    options = parser.parse_args()
    torch.manual_seed(0)
    found: dict[str, Any] = {"what": __doc__, "machine": machine(), "layers": LAYERS}
    for name in options.shape:
        print(name, flush=True)
        layers = [layer(SHAPES[name]) for _ in range(LAYERS)]
        found[name] = [measure(layers, count) for count in options.rows]
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def layer(shape: Shape) -> Layer:
    """Random codes and scales near 1."""
    shapes = [
        (shape.queries + 2 * shape.keys, shape.hidden),
        (shape.hidden, shape.queries),
        (2 * shape.intermediate, shape.hidden),
        (shape.hidden, shape.intermediate),
    ]
    weights = []
    for outputs, columns in shapes:
        codes = torch.randint(0, 256, (outputs, columns // 2), dtype=torch.uint8, device=DEVICE)
        scales = torch.rand(outputs, columns // 16, device=DEVICE).add_(0.5).to(torch.float8_e4m3fn)
        weights.append(prepare_weight(codes, scales, native=False))
    factors = [torch.rand(shape.hidden, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    return Layer(*weights, *(Norm(factor + 0.5, EPSILON) for factor in factors))


@torch.compile
def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """As vLLM's fused_add_rms_norm (vllm 0.32 ir/ops/layernorm.py:47)."""
    total = x.float() + residual.float()
    normal = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPSILON)
    return normal.to(x.dtype) * weight, total.to(x.dtype)


def attention(qkv: Tensor, layer: Layer) -> Tensor:
    """As many queries as the product after attention has columns."""
    return qkv[:, : layer.output.codes.shape[1] * 128] * 1.0


def apart(layers: list[Layer], x: Tensor) -> Tensor:
    hidden, residual = rms_norm(x, *layers[0].first_norm), x
    for number, one in enumerate(layers):
        attended = attention(product(hidden, one.qkv), one)
        hidden, residual = add_norm(product(attended, one.output), residual, one.second_norm.weight)
        hidden = product(product(hidden, one.gate_up, silu_mul=True), one.down)
        following = layers[(number + 1) % len(layers)]
        hidden, residual = add_norm(hidden, residual, following.first_norm.weight)
    return residual


def chained(layers: list[Layer], x: Tensor) -> Tensor:
    for one in layers:
        attended = attention(product(rms_norm(x, *one.first_norm), one.qkv), one)
        x = product(attended, one.output, residual=x)
        middle = product(rms_norm(x, *one.second_norm), one.gate_up, silu_mul=True)
        x = product(middle, one.down, residual=x)
    return x


def fused(layers: list[Layer], x: Tensor) -> Tensor:
    qkv = nvfp4_norm_linear(x, layers[0].first_norm, LinearLayer(layers[0].qkv, GLOBAL_SCALE))
    for one, following in pairwise(layers):
        o, gate_up, down, next_qkv = (
            LinearLayer(weight, GLOBAL_SCALE)
            for weight in (one.output, one.gate_up, one.down, following.qkv)
        )
        parts = (o, one.second_norm, gate_up, down, following.first_norm, next_qkv)
        x, qkv = nvfp4_between_attentions(attention(qkv, one), x, *parts)
    last = layers[-1]
    x = product(attention(qkv, last), last.output, residual=x)
    ends = (LinearLayer(weight, GLOBAL_SCALE) for weight in (last.gate_up, last.down))
    return nvfp4_norm_mlp(x, last.second_norm, *ends)


def products(layers: list[Layer], x: Tensor) -> Tensor:
    for one in layers:
        x = product(attention(product(x, one.qkv), one), one.output)
        x = product(product(x, one.gate_up, silu_mul=True), one.down)
    return x


def product(x: Tensor, weight: PreparedWeight, **rest: Any) -> Tensor:
    return nvfp4_weight_linear(x, weight, GLOBAL_SCALE, **rest)


WAYS: dict[str, Callable[[list[Layer], Tensor], Tensor]] = {
    "apart": apart,
    "chained": chained,
    "fused": fused,
    "products": products,
}


def measure(layers: list[Layer], rows: int) -> dict[str, Any]:
    """Microseconds a layer of each way, and how far `chained` and `fused` are from `apart`."""
    hidden = len(layers[0].first_norm.weight)
    x = torch.randn(rows, hidden, device=DEVICE, dtype=torch.bfloat16)
    expected = apart(layers, x).float()
    distances = [
        float((way(layers, x).float() - expected).norm() / expected.norm())
        for way in (chained, fused)
    ]
    found: dict[str, Any] = {"rows": rows, "distance": [round(one, 5) for one in distances]}
    if DEVICE == "cuda":
        found["us_a_layer"] = times({name: graph_of(way, layers, x) for name, way in WAYS.items()})
    print(found, flush=True)
    return found


def graph_of(way: Callable[..., Tensor], layers: list[Layer], x: Tensor) -> torch.cuda.CUDAGraph:
    for _ in range(2):
        way(layers, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            way(layers, x)
    return graph


def times(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken[name].append(begin.elapsed_time(end) * 1000 / (3 * LAYERS))
    return {name: round(statistics.median(each), 2) for name, each in taken.items()}


if __name__ == "__main__":
    main()

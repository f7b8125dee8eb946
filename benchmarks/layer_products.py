"""Time of a decoder layer's products and norms, with gaps between them and as a chain.

    python benchmarks/layer_products.py --out FILE [--rows 1 2 4 8 16 32 64 512]
        [--sizes 4096 12288 4096 1024] [--layers 6]

A CUDA graph has the four products of --layers layers with different weights, of Qwen3-8B's shape
unless --sizes has another: hidden and intermediate size, outputs of all queries and of all keys.
A copy of the queries, by torch, stands for attention. Ways, in turns:

apart    RMSNorm with the residual sum as torch.compile makes it, products without
chained  nibble::rms_norm, which lets its successor begin early, and residual sums in the products
products the products alone
persistent all between two attentions in one launch (nvfp4_layer), up to 8 rows that fit

The median of ROUNDS rounds counts. On a CPU the operators' specification runs, as a check.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from machine import machine
from nibble_kernels.nvfp4_layer import Product, fits, new_meetings, nvfp4_layer_products
from nibble_kernels.nvfp4_linear.gpu import nvfp4_weight_linear
from nibble_kernels.nvfp4_linear.weight import PreparedWeight, prepare_weight
from nibble_kernels.rms_norm import rms_norm
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = (4096, 12288, 4096, 1024) if DEVICE == "cuda" else (256, 512, 256, 64)
LAYERS, ROUNDS = (6, 31) if DEVICE == "cuda" else (1, 1)
GLOBAL_SCALE, EPSILON = 0.01, 1e-6


class Layer(NamedTuple):
    """A layer's prepared weights and norms."""

    qkv: PreparedWeight
    output: PreparedWeight
    gate_up: PreparedWeight
    down: PreparedWeight
    first_norm: Tensor
    second_norm: Tensor
    meetings: Tensor
    queries: int

    def parts(self) -> tuple[Product, Tensor, Product, Product, float, Tensor]:
        """What nvfp4_layer_products takes between two attentions."""
        output, gate_up, down = (
            Product(weight, GLOBAL_SCALE) for weight in (self.output, self.gate_up, self.down)
        )
        return output, self.second_norm, gate_up, down, EPSILON, self.meetings


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 512])
    parser.add_argument("--sizes", type=int, nargs=4, default=SIZES)
    parser.add_argument("--layers", type=int, default=LAYERS)
    options = parser.parse_args()
    torch.manual_seed(0)
    layers = [layer(*options.sizes) for _ in range(options.layers)]
    rows = [measure(layers, count) for count in options.rows]
    if options.out:
        what = {"what": __doc__, "machine": machine(), "sizes": options.sizes}
        found = {**what, "layers": options.layers, "rows": rows}
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def layer(hidden: int, intermediate: int, queries: int, keys: int) -> Layer:
    """Random codes and scales near 1."""
    shapes = [
        (queries + 2 * keys, hidden),
        (hidden, queries),
        (2 * intermediate, hidden),
        (hidden, intermediate),
    ]
    weights = []
    for outputs, columns in shapes:
        codes = torch.randint(0, 256, (outputs, columns // 2), dtype=torch.uint8, device=DEVICE)
        scales = torch.rand(outputs, columns // 16, device=DEVICE).add_(0.5).to(torch.float8_e4m3fn)
        weights.append(prepare_weight(codes, scales, native=False))
    norms = [torch.rand(hidden, device=DEVICE, dtype=torch.bfloat16) + 0.5 for _ in range(2)]
    return Layer(*weights, *norms, meetings=new_meetings(DEVICE), queries=queries)


@torch.compile
def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """As vLLM's fused_add_rms_norm (vllm 0.32 ir/ops/layernorm.py:47)."""
    total = x.float() + residual.float()
    normal = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPSILON)
    return normal.to(x.dtype) * weight, total.to(x.dtype)


def attention(qkv: Tensor, queries: int) -> Tensor:
    return qkv[:, :queries] * 1.0


def apart(layers: list[Layer], x: Tensor) -> Tensor:
    hidden, residual = rms_norm(x, layers[0].first_norm, EPSILON), x
    for number, one in enumerate(layers):
        attended = attention(product(hidden, one.qkv), one.queries)
        hidden, residual = add_norm(product(attended, one.output), residual, one.second_norm)
        hidden = product(product(hidden, one.gate_up, silu_mul=True), one.down)
        following = layers[(number + 1) % len(layers)]
        hidden, residual = add_norm(hidden, residual, following.first_norm)
    return residual


def chained(layers: list[Layer], x: Tensor) -> Tensor:
    for one in layers:
        attended = attention(product(rms_norm(x, one.first_norm, EPSILON), one.qkv), one.queries)
        x = product(attended, one.output, residual=x)
        middle = product(rms_norm(x, one.second_norm, EPSILON), one.gate_up, silu_mul=True)
        x = product(middle, one.down, residual=x)
    return x


def persistent(layers: list[Layer], x: Tensor, division: Sequence[int] = ()) -> Tensor:
    qkv: Tensor | None = product(rms_norm(x, layers[0].first_norm, EPSILON), layers[0].qkv)
    for one, following in zip(layers, [*layers[1:], None], strict=True):
        after = (following.first_norm, Product(following.qkv, GLOBAL_SCALE)) if following else ()
        assert qkv is not None
        x, qkv = nvfp4_layer_products(
            attention(qkv, one.queries), x, *one.parts(), *after, division=division
        )
    return x


def products(layers: list[Layer], x: Tensor) -> Tensor:
    for one in layers:
        x = product(attention(product(x, one.qkv), one.queries), one.output)
        x = product(product(x, one.gate_up, silu_mul=True), one.down)
    return x


def product(x: Tensor, weight: PreparedWeight, **rest: Any) -> Tensor:
    return nvfp4_weight_linear(x, weight, GLOBAL_SCALE, **rest)


WAYS: dict[str, Callable[[list[Layer], Tensor], Tensor]] = {
    "apart": apart,
    "chained": chained,
    "products": products,
}
# Whether bulk copies fetch the weights, slots of a warp's ring, and tiles of a slot.
DIVISIONS = ((1, 5, 2), (1, 2, 4), (1, 4, 2), (1, 3, 2), (1, 2, 2), (0, 2, 4), (0, 4, 2), (0, 2, 2))


def ways(rows: int, layer: Layer) -> dict[str, Callable[[list[Layer], Tensor], Tensor]]:
    found = dict(WAYS)
    columns = (len(layer.first_norm), layer.queries, layer.gate_up.rows // 2)
    for division in DIVISIONS:
        if fits(rows, columns[0], columns, torch.device(DEVICE), division[1] * division[2]):
            name = "persistent " + " ".join(map(str, division))
            found[name] = functools.partial(persistent, division=division)
    return found


def measure(layers: list[Layer], rows: int) -> dict[str, Any]:
    """Microseconds a layer of each way, and how far `chained` is from `apart`."""
    x = torch.randn(rows, len(layers[0].first_norm), device=DEVICE, dtype=torch.bfloat16)
    expected, chain = apart(layers, x).float(), chained(layers, x).float()
    distance = float((chain - expected).norm() / expected.norm())
    found: dict[str, Any] = {"rows": rows, "distance": round(distance, 5)}
    for name, way in ways(rows, layers[0]).items():
        if name.startswith("persistent"):
            distance = float((way(layers, x).float() - chain).norm() / expected.norm())
            found["distance of " + name] = round(distance, 5)
    if DEVICE == "cuda":
        graphs = {name: graph_of(way, layers, x) for name, way in ways(rows, layers[0]).items()}
        found["us_a_layer"] = times(graphs, len(layers))
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


def times(graphs: dict[str, torch.cuda.CUDAGraph], layers: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken[name].append(begin.elapsed_time(end) * 1000 / (3 * layers))
    return {name: round(statistics.median(each), 2) for name, each in taken.items()}


if __name__ == "__main__":
    main()

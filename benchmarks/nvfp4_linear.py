"""Speed of nibble's products with NVFP4 weights beside cuBLAS in BF16, Marlin and Humming.

    python benchmarks/nvfp4_linear.py --out FILE [--shapes main|more|all] [--rows 1 2 4 ...]
        [--without-vllm] [--alternatives] [--divisions decode|warpgroup]

Every implementation has several copies of a shape's weights, enough to fill the L2 cache four
times, and one CUDA graph that multiplies by each copy once. The graphs replay alternately, and the
median counts. Bytes are those of codes and scales (BF16: of the weight). The read bandwidth is
torch.sum's over 2 GiB in the same run. --alternatives adds the decode kernel up to 64 rows, the
warpgroup kernel up to 16 rows on SM90, and the product with a dequantized weight. --divisions
measures every way to divide a kernel's work, instead of the other implementations.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import machine
from nibble_kernels.nvfp4_linear.gpu import (
    MAX_DECODE_ROWS,
    MAX_DECODE_ROWS_SM90,
    nvfp4_decode_linear,
    nvfp4_dequantize_weight,
    nvfp4_warpgroup_linear,
    nvfp4_weight_linear,
)
from nibble_kernels.nvfp4_linear.weight import PreparedWeight, prepare_weight
from torch import Tensor

# (N, K) of Qwen3-8B, a 27B model and others that docs/kernels/nvfp4_linear.md reports.
MAIN = [
    (4096, 4096),
    (6144, 4096),
    (24576, 4096),
    (4096, 12288),
    (5120, 5120),
    (34816, 5120),
    (5120, 17408),
    (8192, 8192),
]
MORE = [(8192, 5120), (5120, 6144), (28672, 4096), (4096, 14336), (248320, 5120)]
SHAPES = {"main": MAIN, "more": MORE, "all": MAIN + MORE}
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256, 512, 1024, 2048)
GLOBAL_SCALE = 0.01
DECODE, WARPGROUP = "decode kernel", "warpgroup kernel"
MOST_ROWS = {DECODE: MAX_DECODE_ROWS, WARPGROUP: MAX_DECODE_ROWS_SM90}  # elsewhere no alternative
ROUNDS = 15
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Product = Callable[[Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shapes", choices=SHAPES, default="main")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--without-vllm", action="store_true")
    parser.add_argument("--alternatives", action="store_true")
    parser.add_argument("--divisions", choices=DIVISIONS)
    options = parser.parse_args()
    torch.manual_seed(0)
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from nvfp4_layers import distributed_environment

    alone = options.without_vllm or options.divisions
    with nullcontext() if alone else distributed_environment("cuda"):
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
    print(f"{torch.cuda.get_device_name()}, reads {read / 1e9:.0f} GB/s")
    for rows, columns in SHAPES[options.shapes]:
        shape = (rows, columns)
        if options.divisions:
            found = every_division(shape, options.rows, read, DIVISIONS[options.divisions])
        else:
            products = implementations(shape, not options.without_vllm, options.alternatives)
            found = side_by_side(shape, options.rows, read, products)
        for row in found:
            results.append(row)
            print(json.dumps(row), flush=True)
        if options.out:  # after each shape: a lent machine may go
            options.out.write_text(json.dumps(described, indent=1) + "\n")


def side_by_side(
    shape: tuple[int, int], batches: list[int], read: float, products: dict[str, list[Product]]
) -> Iterator[dict[str, Any]]:
    """A row for each batch: µs, GB/s, share of the read bandwidth, ratio to each other
    implementation.
    """
    for batch in batches:
        x = torch.randn(batch, shape[1], device="cuda", dtype=torch.bfloat16)
        times = interleaved(
            {
                name: [partial(call, x) for call in calls]
                for name, calls in products.items()
                if batch <= MOST_ROWS.get(name, batch)
            }
        )
        yield row_of(shape, batch, times, read)


def every_division(
    shape: tuple[int, int],
    batches: list[int],
    read: float,
    products_of: Callable[[int, PreparedWeight], dict[str, Product]],
) -> Iterator[dict[str, Any]]:
    """The time with each division, and with the kernel's choice."""
    weights = copies(shape)
    for batch in batches:
        x = torch.randn(batch, shape[1], device="cuda", dtype=torch.bfloat16)
        products = [products_of(batch, weight) for weight in weights]
        calls = {
            name: [partial(each[name], x) for each in products]
            for name, product in products[0].items()
            if runs(product, x)
        }
        yield row_of(shape, batch, interleaved(calls), read)


def runs(product: Product, x: Tensor) -> bool:
    """Whether this GPU can divide the work so."""
    try:
        product(x)
    except RuntimeError as error:
        if "no such division" not in str(error):
            raise
        return False
    return True


def decode_divisions(batch: int, weight: PreparedWeight) -> dict[str, Product]:
    """Clusters of one, two and four thread blocks."""
    divisions = [(), (1, 1), (2, 1), (4, 1)]
    return {
        str(division) if division else "nibble": partial(
            nvfp4_decode_linear,
            weight=weight,
            global_scale=GLOBAL_SCALE,
            division=division,
        )
        for division in divisions
    }


def warpgroup_divisions(batch: int, weight: PreparedWeight) -> dict[str, Product]:
    """Every form for so many rows: whole units, clusters of 2 to 8 thread blocks, equal ranges."""
    tokens = next((tile for tile in (32, 64) if batch <= tile), 128)
    found: dict[str, Product] = {}
    for rows in {32: (192, 256), 64: (192,)}.get(tokens, (128, 192, 256)):
        sharings = [(0, 1), *((1, ranks) for ranks in range(2, 9)), (2, 1)]
        for division in [(), *((tokens, rows, *sharing) for sharing in sharings)]:
            found[str(division) if division else "nibble"] = partial(
                nvfp4_warpgroup_linear,
                weight=weight,
                global_scale=GLOBAL_SCALE,
                division=division,
            )
    return found


DIVISIONS = {"decode": decode_divisions, "warpgroup": warpgroup_divisions}


def row_of(
    shape: tuple[int, int], batch: int, times: dict[str, float], read: float
) -> dict[str, Any]:
    size = packed_bytes(shape)
    own = times["nibble"]
    return {
        "n": shape[0],
        "k": shape[1],
        "rows": batch,
        "us": {name: round(time * 1e6, 2) for name, time in times.items()},
        "gb_per_s": round(size / own / 1e9),
        "percent_of_read": round(100 * size / own / read, 1),
        "ratio": {name: round(time / own, 2) for name, time in times.items() if name != "nibble"},
    }


def packed_bytes(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1] * 9 // 16


def copies(shape: tuple[int, int]) -> list[PreparedWeight]:
    """Prepared random weights that together fill the L2 cache four times."""
    count = max(2, -(-4 * torch.cuda.get_device_properties(0).L2_cache_size // packed_bytes(shape)))
    return [prepare_weight(*random_weight(shape), native=False) for _ in range(count)]


def random_weight(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    rows, columns = shape
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=DEVICE)
    scales = (torch.rand(rows, columns // 16, device=DEVICE) + 0.5).to(torch.float8_e4m3fn)
    return codes, scales


def implementations(
    shape: tuple[int, int], with_vllm: bool, with_alternatives: bool = False
) -> dict[str, list[Product]]:
    """Calls on x, one for each copy of the weight."""
    weights = copies(shape)
    found: dict[str, list[Product]] = {
        "nibble": [
            lambda x, weight=weight: nvfp4_weight_linear(x, weight, GLOBAL_SCALE)
            for weight in weights
        ]
    }
    like = torch.empty(0, dtype=torch.bfloat16, device="cuda")
    dense = [
        nvfp4_dequantize_weight(weight, shape[1], like)
        for weight in weights[: max(2, len(weights) // 3)]
    ]
    found["cublas bf16"] = [
        lambda x, weight=weight: torch.nn.functional.linear(x, weight) for weight in dense
    ]
    if with_alternatives:
        found[DECODE] = [
            lambda x, weight=weight: nvfp4_decode_linear(x, weight, GLOBAL_SCALE)
            for weight in weights
        ]
        if torch.cuda.get_device_capability() == (9, 0):
            found[WARPGROUP] = [
                lambda x, weight=weight: nvfp4_warpgroup_linear(x, weight, GLOBAL_SCALE)
                for weight in weights
            ]
        found["dequantized"] = [
            lambda x, weight=weight: torch.addmm(
                x.new_empty(1),
                x,
                nvfp4_dequantize_weight(weight, shape[1], x).T,
                beta=0,
                alpha=GLOBAL_SCALE,
            )
            for weight in weights
        ]
    if with_vllm:
        found |= vllm_kernels(shape, len(weights))
    return found


def vllm_kernels(
    shape: tuple[int, int], count: int, names: Sequence[str] = ("marlin", "humming")
) -> dict[str, list[Product]]:
    """vLLM's layers with these values of --linear-backend, without nibble's plugin."""
    from nvfp4_layers import vllm_config

    found: dict[str, list[Product]] = {}
    for name in names:
        with vllm_config(name, {}):
            layers = [vllm_layer(shape) for _ in range(count)]
        found[name] = [
            lambda x, layer=layer: layer.quant_method.apply(layer, x) for layer in layers
        ]
    return found


def vllm_layer(shape: tuple[int, int]) -> Any:
    """A linear layer as in a weight-only ModelOpt checkpoint, with random weights."""
    from nvfp4_layers import CONFIGS
    from vllm.model_executor.layers.linear import ReplicatedLinear

    codes, scales = random_weight(shape)
    with torch.device(codes.device):
        layer = ReplicatedLinear(
            shape[1],
            shape[0],
            bias=False,
            quant_config=CONFIGS["modelopt"]("bf16"),
            prefix="linear",
        )
    parameters = dict(layer.named_parameters())
    parameters["weight"].data.copy_(codes)
    parameters["weight_scale"].data.copy_(scales)
    parameters["weight_scale_2"].data.fill_(GLOBAL_SCALE)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def interleaved(calls: dict[str, list[Callable[[], Tensor]]]) -> dict[str, float]:
    """Seconds of one call of each: medians of graph replays that alternate."""
    graphs = {name: captured(some) for name, some in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 2):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 2:
                times[name].append(begin.elapsed_time(end) / 1e3 / len(calls[name]))
    return {name: statistics.median(some) for name, some in times.items()}


def captured(calls: list[Callable[[], Tensor]]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def read_bandwidth() -> float:
    """Bytes per second of torch.sum over 2 GiB."""
    x = torch.zeros(1 << 28, dtype=torch.int64, device="cuda")
    return x.numel() * 8 / interleaved({"read": [lambda: torch.sum(x)] * 4})["read"]


if __name__ == "__main__":
    main()

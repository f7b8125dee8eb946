"""Speed of a layer of NVFP4 experts: nibble's kernels beside vLLM's Marlin, from the router's
choices to the sum.

    python benchmarks/nvfp4_moe.py --out FILE [--shapes 30b-a3b 35b-a3b ...] [--tokens 1 2 4 ...]
        [--routing uniform zipf] [--libraries FOLDER] [--forms]

Each call of a CUDA graph has another routing, enough of them that the weights in use exceed the L2
cache. The graphs replay alternately, and the median counts. Bytes are those of the codes and scales
of the experts in use. The read bandwidth is torch.sum's over 2 GiB in the same run.
`marlin` is the work of vLLM 0.32's fused_marlin_moe (experts/marlin_moe.py:224), with the operators
of FOLDER's `_moe_C_stable_libtorch.abi3.so` and `_C_stable_libtorch.abi3.so` (default: the
installed vLLM's), on random data in its layout. `decode` is nibble's kernel for few tokens alone.
--forms adds every form of nibble's grouped kernel: tiles of so many tokens.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from machine import machine
from nibble_kernels.nvfp4_moe.gpu import (
    MAX_PAIRS,
    MAX_TOKENS,
    nvfp4_moe_decode_linear,
    nvfp4_weight_moe,
)
from nibble_kernels.nvfp4_moe.grouped import nvfp4_moe_linear
from nibble_kernels.nvfp4_moe.weight import PreparedExperts
from nvfp4_linear import interleaved, read_bandwidth
from torch import Tensor


class Shape(NamedTuple):
    experts: int
    topk: int
    hidden: int
    intermediate: int

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.intermediate * 9 // 16


SHAPES = {
    "30b-a3b": Shape(128, 8, 2048, 768),
    "35b-a3b": Shape(256, 8, 2048, 512),
    "glm-4.5-air": Shape(128, 8, 4096, 1408),
    "gpt-oss-120b": Shape(128, 4, 2880, 2880),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
FORMS = (8, 16, 32, 64, 128)  # tokens of a tile
FEW, MOST_FEW_PAIRS = (-4, -8), 512  # groups of a unit in the forms for few pairs
FE2M1F = 562949953487106  # vllm.scalar_type.scalar_types.float4_e2m1f.id
Call = Callable[[], Tensor]


class Routing(NamedTuple):
    ids: Tensor
    weights: Tensor

    @property
    def used(self) -> int:
        return len(self.ids.unique())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=["30b-a3b", "35b-a3b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--routing", choices=EXPONENTS, nargs="+", default=list(EXPONENTS))
    parser.add_argument("--libraries", type=Path)
    parser.add_argument("--forms", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    has_marlin = load_marlin(options.libraries)
    read = read_bandwidth()
    results: list[dict[str, Any]] = []
    described = {
        "machine": machine(),
        "read_gb_per_s": round(read / 1e9),
        "command": sys.argv,
        "results": results,
    }
    print(f"{torch.cuda.get_device_name()}, reads {read / 1e9:.0f} GB/s, Marlin: {has_marlin}")
    for name in options.shapes:
        shape = SHAPES[name]
        layer = NibbleLayer(shape)
        marlin = MarlinLayer(shape) if has_marlin else None
        for routing in options.routing:
            for tokens in options.tokens:
                row = measure(shape, layer, marlin, tokens, routing, options.forms, read)
                results.append({"shape": name} | row)
                print(json.dumps(results[-1]), flush=True)
                if options.out:
                    options.out.write_text(json.dumps(described, indent=1) + "\n")


EXPONENTS = {"uniform": 0.0, "zipf": 1.2}


def routings(shape: Shape, tokens: int, exponent: float) -> list[Routing]:
    """Choices of which several calls together use more than the L2 cache holds."""
    likely = (torch.arange(shape.experts, device="cuda") + 1.0) ** -exponent
    found = []
    for _ in range(16 if tokens <= 8 else 8 if tokens <= 256 else 2):
        shuffled = likely[torch.randperm(shape.experts, device="cuda")]
        ids = torch.multinomial(shuffled.expand(tokens, -1), shape.topk).int()
        found.append(Routing(ids, torch.rand(tokens, shape.topk, device="cuda")))
    return found


def measure(
    shape: Shape,
    layer: NibbleLayer,
    marlin: MarlinLayer | None,
    tokens: int,
    routing: str,
    forms: bool,
    read: float,
) -> dict[str, Any]:
    """One row: µs of each implementation, its share of the read bandwidth, ratios."""
    x = torch.randn(tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
    some = routings(shape, tokens, EXPONENTS[routing])
    calls: dict[str, list[Call]] = {"nibble": [partial(layer.chosen, x, one) for one in some]}
    if tokens <= 64:
        calls["decode"] = [partial(layer.decode, x, one) for one in some]
    if forms:
        if tokens * shape.topk <= MOST_FEW_PAIRS:
            for form in FEW:
                name = f"few pairs, units of {-form} groups"
                calls[name] = [partial(layer.grouped, x, one, form) for one in some]
        for form in FORMS:
            if form / 48 <= tokens * shape.topk / shape.experts <= form * 2:
                calls[f"tiles of {form}"] = [partial(layer.grouped, x, one, form) for one in some]
    if marlin:
        calls["marlin"] = [partial(marlin.run, x, one) for one in some]
    times = interleaved(calls)
    used = sum(one.used for one in some) / len(some)
    own = times["nibble"]
    return {
        "tokens": tokens,
        "routing": routing,
        "experts_in_use": round(used, 1),
        "us": {name: round(time * 1e6, 2) for name, time in times.items()},
        "percent_of_read": round(100 * used * shape.expert_bytes / own / read, 1),
        "ratio": {name: round(time / own, 2) for name, time in times.items() if name != "nibble"},
    }


class NibbleLayer:
    """Random weights in the prepared layout: any bytes are codes, scales are near one."""

    def __init__(self, shape: Shape) -> None:
        self.w13 = self._weight(shape.experts, 2 * shape.intermediate, shape.hidden)
        self.w2 = self._weight(shape.experts, shape.hidden, shape.intermediate)

    @staticmethod
    def _weight(experts: int, rows: int, columns: int) -> PreparedExperts:
        groups, chunks = -(-rows // 16), -(-columns // 128)
        codes = torch.randint(
            0, 256, (experts, groups, chunks, 2, 32, 16), dtype=torch.uint8, device="cuda"
        )
        scales = torch.randint(
            0x34, 0x3C, (experts, groups, chunks, 32, 4), dtype=torch.uint8, device="cuda"
        )
        factors = torch.full((experts, 2), 0.01, device="cuda")
        return PreparedExperts(codes, scales, factors, rows, native=False)

    def chosen(self, x: Tensor, routing: Routing) -> Tensor:
        return nvfp4_weight_moe(x, routing.weights, routing.ids, self.w13, self.w2)

    def grouped(self, x: Tensor, routing: Routing, form: int) -> Tensor:
        return nvfp4_moe_linear(x, routing.weights, routing.ids, self.w13, self.w2, form=form)

    def decode(self, x: Tensor, routing: Routing) -> Tensor:
        topk = routing.ids.shape[1]
        step, out = min(MAX_TOKENS, MAX_PAIRS // topk), torch.empty_like(x)
        for part in (slice(begin, begin + step) for begin in range(0, len(x), step)):
            ids, weights = routing.ids[part], routing.weights[part]
            h = nvfp4_moe_decode_linear(x[part], self.w13, ids, silu_mul=True)
            y = nvfp4_moe_decode_linear(h, self.w2, ids, topk_weights=weights)
            out[part] = y.unflatten(0, (-1, topk)).sum(1)
        return out


def load_marlin(folder: Path | None) -> bool:
    """Load vLLM's compiled operators without vLLM. False if there are none."""
    if folder is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            return False
        folder = Path(spec.origin).parent
    paths = [folder / f"{name}_stable_libtorch.abi3.so" for name in ("_moe_C", "_C")]
    if not all(path.exists() for path in paths):
        return False
    for path in paths:
        torch.ops.load_library(path)
    return True


class MarlinLayer:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.w1, self.s1 = self._weight(2 * shape.intermediate, shape.hidden)
        self.w2, self.s2 = self._weight(shape.hidden, shape.intermediate)
        self.factor = torch.full((shape.experts,), 0.01, device="cuda", dtype=torch.float32)
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.workspace = torch.zeros(4 * sms, dtype=torch.int32, device="cuda")

    def _weight(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        experts = self.shape.experts
        codes = torch.randint(
            -(2**31), 2**31, (experts, columns // 16, 2 * rows), dtype=torch.int32, device="cuda"
        )
        scales = torch.randint(
            0x50, 0x58, (experts, columns // 16, rows), dtype=torch.uint8, device="cuda"
        )
        return codes, scales.view(torch.float8_e4m3fn)

    def run(self, x: Tensor, routing: Routing) -> Tensor:
        shape, tokens = self.shape, len(x)
        pairs = tokens * shape.topk
        block = next((size for size in (8, 16, 32, 48) if pairs / shape.experts / size < 0.9), 64)
        aligned = self._aligned(routing.ids, block)
        middle = x.new_empty(pairs, 2 * shape.intermediate)
        self._product(x, middle, self.w1, self.s1, aligned, routing, block, shape.topk)
        h = x.new_empty(pairs, shape.intermediate)
        torch.ops._C.silu_and_mul(h, middle)
        y = x.new_empty(pairs, shape.hidden)
        self._product(h, y, self.w2, self.s2, aligned, routing, block, 1)
        out = torch.empty_like(x)
        torch.ops._moe_C.moe_sum(y.view(tokens, shape.topk, -1), out, None, None)
        return out

    def _aligned(self, ids: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
        """As vLLM's moe_align_block_size."""
        experts = self.shape.experts
        most = ids.numel() + experts * (block - 1)
        if ids.numel() < experts:
            most = min(ids.numel() * block, most)
        order = torch.empty(most, dtype=torch.int32, device="cuda")
        expert_ids = torch.empty(-(-most // block), dtype=torch.int32, device="cuda")
        count = torch.empty(1, dtype=torch.int32, device="cuda")
        torch.ops._moe_C.moe_align_block_size(
            ids, experts, block, order, expert_ids, count, None, None
        )
        return order, expert_ids, count

    def _product(
        self,
        x: Tensor,
        out: Tensor,
        codes: Tensor,
        scales: Tensor,
        aligned: tuple[Tensor, Tensor, Tensor],
        routing: Routing,
        block: int,
        topk: int,
    ) -> None:
        torch.ops._moe_C.moe_wna16_marlin_gemm(
            x,
            out,
            codes,
            None,
            scales,
            None,
            self.factor,
            None,
            self.workspace,
            *aligned,
            routing.weights,
            block,
            topk,
            topk == 1,
            FE2M1F,
            len(x),
            out.shape[1],
            x.shape[1],
            False,
            True,
            False,
            -1,
            -1,
            -1,
        )


if __name__ == "__main__":
    main()

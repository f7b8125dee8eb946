"""Speed of nibble's router of experts beside a linear gate and vLLM's topk_softmax, with and
without RMSNorm in front and nibble's experts behind.

    python benchmarks/route_experts.py --out FILE [--shapes 30b-a3b ...] [--tokens 1 2 4 ...]
        [--libraries FOLDER] [--divisions]

A CUDA graph has 48 calls with 48 gates, as the layers of a model have: a norm's sum is the next
call's residual, and with experts their result is the next x. Before each replay the L2 cache is
filled with other data. The graphs replay alternately, and the median counts. The norm beside it is
vLLM's expression compiled by inductor. vLLM's operators come from FOLDER's
`_moe_C_stable_libtorch.abi3.so` (default: the installed vLLM's); without them torch's softmax and
topk stand in. --divisions measures clusters of 1, 2, 4 and 8 blocks too. "At once" and "apart" are
the two ways of nibble's operators, of which they choose one by the number of tokens. "Stock shared
gate" is what vLLM computes for a shared expert's gate, with the multiplication.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from machine import machine
from nibble_kernels.nvfp4_moe.gpu import nvfp4_weight_moe
from nibble_kernels.router import APART, norm_route_experts, route_experts, weights_and_ids
from nvfp4_linear import captured
from nvfp4_moe import NibbleLayer
from nvfp4_moe import Shape as Experts
from torch import Tensor

CALLS = 48
ROUNDS = 12
EPSILON = 1e-6
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 2048)


class Shape(NamedTuple):
    experts: int
    hidden: int
    topk: int
    intermediate: int | None  # of experts behind the router


SHAPES = {
    "30b-a3b": Shape(128, 2048, 8, 768),
    "35b-a3b": Shape(256, 2048, 8, 512),
    "80b-a3b": Shape(512, 2048, 10, None),
    "397b-a17b": Shape(512, 4096, 10, None),
}
Pair = tuple[Tensor, Tensor]  # weights, ids


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--libraries", type=Path)
    parser.add_argument("--divisions", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    theirs = topk_of_vllm if load_topk(options.libraries) else topk_of_torch
    results: list[dict[str, Any]] = []
    described = {
        "machine": machine(),
        "topk": theirs.__name__,
        "command": sys.argv,
        "results": results,
    }
    print(f"{torch.cuda.get_device_name()}, {theirs.__name__}")
    for name in options.shapes:
        layers = Layers(SHAPES[name], theirs)
        for tokens in options.tokens:
            results.append({"shape": name} | measure(layers, tokens, options.divisions))
            print(json.dumps(results[-1]), flush=True)
            if options.out:
                options.out.write_text(json.dumps(described, indent=1) + "\n")


def load_topk(folder: Path | None) -> bool:
    """Load vLLM's operators without vLLM. False if there are none."""
    if folder is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            return False
        folder = Path(spec.origin).parent
    path = folder / "_moe_C_stable_libtorch.abi3.so"
    if path.exists():
        torch.ops.load_library(path)
    return path.exists()


def topk_of_vllm(logits: Tensor, topk: int) -> Pair:
    weights = logits.new_empty((len(logits), topk), dtype=torch.float32)
    ids, rows = (torch.empty_like(weights, dtype=torch.int32) for _ in range(2))
    torch.ops._moe_C.topk_softmax(weights, ids, rows, logits, True, None, None)
    return weights, ids


def topk_of_torch(logits: Tensor, topk: int) -> Pair:
    weights, ids = logits.softmax(-1, dtype=torch.float32).topk(topk, dim=-1)
    return weights / weights.sum(-1, keepdim=True), ids.int()


def add_and_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Pair:
    """vLLM 0.32's ir/ops/layernorm.py."""
    total = x.float() + residual.float()
    y = total * torch.rsqrt(total.pow(2).mean(dim=-1, keepdim=True) + EPSILON)
    return (y.to(weight.dtype) * weight).to(x.dtype), total.to(x.dtype)


class Layers:
    """The gates of CALLS layers, one norm, and one layer of experts larger than the L2 cache."""

    def __init__(self, shape: Shape, theirs: Callable[[Tensor, int], Pair]) -> None:
        self.shape, self._theirs = shape, theirs
        gates = torch.randn(CALLS, shape.experts, shape.hidden, device="cuda")
        self.gates = (gates / shape.hidden**0.5).to(torch.bfloat16).unbind()
        self.norm = torch.ones(shape.hidden, device="cuda", dtype=torch.bfloat16)
        torch._dynamo.reset()  # so that only the number of tokens is dynamic, as in vLLM
        self._compiled = torch.compile(add_and_norm)
        self._experts = None
        if shape.intermediate:
            self._experts = NibbleLayer(
                Experts(shape.experts, shape.topk, shape.hidden, shape.intermediate)
            )

    def calls(self, tokens: int, divisions: bool) -> dict[str, Callable[[], object]]:
        """Each is CALLS layers in a row."""
        shape = self.shape
        x = torch.randn(tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)

        def stock(x: Tensor, gate: Tensor) -> Pair:
            return self._theirs(torch.nn.functional.linear(x, gate), shape.topk)

        def ours(x: Tensor, gate: Tensor, division: tuple[int, int] = (0, 0)) -> Pair:
            return weights_and_ids(route_experts(x, gate, shape.topk, division=division))

        def stock_norm(x: Tensor, residual: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Pair]:
            y, total = self._compiled(x, residual, self.norm)
            return y, total, stock(y, gate)

        def our_norm(
            x: Tensor,
            residual: Tensor,
            gate: Tensor,
            division: tuple[int, int] = (0, 0),
            shared_gate: Tensor | None = None,
        ) -> tuple[Tensor, Tensor, Pair]:
            y, total, choices, _ = norm_route_experts(
                x, residual, self.norm, EPSILON, gate, shape.topk, division=division,
                shared_gate=shared_gate,
            )  # fmt: skip
            return y, total, weights_and_ids(choices)

        def norm_then_ours(x: Tensor, residual: Tensor, gate: Tensor) -> tuple[Any, Any, Pair]:
            y, total = self._compiled(x, residual, self.norm)
            return y, total, ours(y, gate)

        def apart(route: Callable[..., Pair], **options: Any) -> Callable[[], object]:
            return lambda: [route(x, gate, **options) for gate in self.gates]

        def chained(step: Callable[..., Any], **options: Any) -> Callable[[], object]:
            def run() -> Tensor:
                now, residual = x, x
                for gate in self.gates:
                    now, residual, _ = step(now, residual, gate, **options)
                return now

            return run

        def with_experts(step: Callable[..., Any]) -> Callable[[], object]:
            assert self._experts is not None
            experts = self._experts

            def run() -> Tensor:
                now, residual = x, x
                for gate in self.gates:
                    y, residual, (weights, ids) = step(now, residual, gate)
                    now = nvfp4_weight_moe(y, weights, ids, experts.w13, experts.w2)
                return now

            return run

        found = {
            "stock router": apart(stock),
            "nibble router": apart(ours),
            "stock norm, router": chained(stock_norm),
            "stock norm, nibble router": chained(norm_then_ours),
            "nibble norm and router": chained(our_norm),
            "nibble norm and router, with a shared gate": chained(our_norm, shared_gate=self.norm),
        }
        found["stock shared gate"] = lambda: [
            torch.sigmoid(torch.nn.functional.linear(x, gate[:1])) * x for gate in self.gates
        ]
        # Groups as a launch takes them on 132 multiprocessors
        at_once = (1 if tokens <= 128 else 2 if tokens <= 256 else 4, 0)
        for name, division in (("at once", at_once), ("apart", APART)):
            found[f"nibble router, {name}"] = apart(ours, division=division)
            found[f"nibble norm and router, {name}"] = chained(our_norm, division=division)
        if divisions:
            for ranks in (1, 2, 4, 8):
                found[f"nibble router, {ranks} ranks"] = apart(ours, division=(1, ranks))
        if self._experts is not None:
            routed = [ours(x, gate) for gate in self.gates]
            experts = self._experts
            found["experts"] = lambda: [
                nvfp4_weight_moe(x, *pair, experts.w13, experts.w2) for pair in routed
            ]
            found["stock norm, router, experts"] = with_experts(stock_norm)
            found["stock norm, nibble router, experts"] = with_experts(norm_then_ours)
            found["nibble norm and router, experts"] = with_experts(our_norm)
        return found


def measure(layers: Layers, tokens: int, divisions: bool) -> dict[str, Any]:
    """µs of a layer, and ratios to nibble's."""
    times = interleaved_cold(layers.calls(tokens, divisions))
    us = {name: round(time * 1e6 / CALLS, 2) for name, time in times.items()}
    ratios = {
        "router": us["stock router"] / us["nibble router"],
        "norm and router": us["stock norm, router"] / us["nibble norm and router"],
    }
    if "experts" in us:
        ratios["with experts"] = (
            us["stock norm, router, experts"] / us["nibble norm and router, experts"]
        )
    return {
        "tokens": tokens,
        "us": us,
        "ratio": {name: round(ratio, 2) for name, ratio in ratios.items()},
    }


def interleaved_cold(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Seconds of each: medians of graph replays that alternate, with other data in the cache."""
    graphs = {name: captured([call]) for name, call in calls.items()}
    size = torch.cuda.get_device_properties(0).L2_cache_size
    other = torch.empty(2 * size, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 2):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            other.zero_()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 2:
                times[name].append(begin.elapsed_time(end) / 1e3)
    return {name: statistics.median(some) for name, some in times.items()}


if __name__ == "__main__":
    main()

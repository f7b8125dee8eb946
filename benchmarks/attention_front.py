"""Times what comes before attention on one GPU, in turns, from CUDA graphs: nibble's kernel and
vLLM's separate ones.

    python benchmarks/attention_front.py --out FILE.json

A graph has 36 calls, as a step of 36 layers, each with its own rows, weights and cache. vLLM's are
rms_norm for queries and for keys or fused_qk_norm_rope, then rotary_embedding, then
reshape_and_cache_flash; with an FP8 cache also scaled_fp8_quant of the queries, which
FlashAttention 3 takes in FP8. `inductor` is what torch.compile makes of vLLM's torch code for
norms, RoPE and queries, with reshape_and_cache_flash. It needs vLLM for CUDA and nibble-kernels
compiled for this GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
CALLS, ROUNDS, REPLAYS = 36, 9, 20
HEAD_DIM, PAGE, MOST_POSITIONS, EPSILON = 128, 16, 40960, 1e-6
TOKENS = (1, 4, 8, 16, 32, 64, 512)
FORMS = ((32, 8, True), (32, 4, True), (32, 8, False))  # heads, KV heads, norms of q and k
Call = Callable[["Layer"], None]


@dataclass
class Layer:
    """What one call reads and writes."""

    qkv: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    cache: Tensor  # [pages, KV heads, tokens, 2 D]
    q: Tensor
    rounded_q: Tensor
    scratch: tuple[Tensor, Tensor]  # queries and keys after their norm


@dataclass
class Step:
    """The calls of one graph."""

    heads: int
    kv_heads: int
    layers: list[Layer]
    positions: Tensor
    slots: Tensor
    cos_sin: Tensor
    scale: Tensor

    @property
    def is_fp8(self) -> bool:
        return self.layers[0].cache.dtype == FP8

    def parts(self, layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, [tokens, heads, D]."""
        by_head = layer.qkv.unflatten(1, (-1, HEAD_DIM))
        q, k, v = by_head.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return q, k, v


def make_step(tokens: int, heads: int, kv_heads: int, norms: bool, fp8: bool) -> Step:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").bfloat16()

    def layer() -> Layer:
        pages = random(-(-tokens // PAGE) + 4, PAGE, kv_heads, 2 * HEAD_DIM)
        q = torch.empty(tokens, heads * HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        k = torch.empty(tokens, kv_heads * HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        return Layer(
            random(tokens, (heads + 2 * kv_heads) * HEAD_DIM),
            random(HEAD_DIM) if norms else None,
            random(HEAD_DIM) if norms else None,
            (pages.to(FP8) if fp8 else pages).transpose(1, 2),
            q,
            torch.empty_like(q, dtype=FP8),
            (q.clone(), k),
        )

    angles = torch.outer(
        torch.arange(MOST_POSITIONS), 1e6 ** -(torch.arange(HEAD_DIM // 2) * 2 / HEAD_DIM)
    )
    return Step(
        heads,
        kv_heads,
        [layer() for _ in range(CALLS)],
        torch.randint(MOST_POSITIONS, (tokens,), device="cuda"),
        torch.randperm((-(-tokens // PAGE) + 4) * PAGE, device="cuda")[:tokens],
        torch.cat((angles.cos(), angles.sin()), dim=1).bfloat16().cuda(),
        torch.ones(1, device="cuda"),
    )


# --- kernels --------------------------------------------------------------------------------------


def nibble(step: Step) -> Call:
    from nibble_kernels.attention_front import attention_front

    scale = step.scale if step.is_fp8 else None

    def call(layer: Layer) -> None:
        attention_front(
            layer.qkv, step.positions, step.cos_sin, heads=step.heads, kv_heads=step.kv_heads,
            q_weight=layer.q_weight, k_weight=layer.k_weight, epsilon=EPSILON, slots=step.slots,
            cache=layer.cache, k_scale=scale, v_scale=scale, q_scale=scale,
            out=layer.rounded_q if step.is_fp8 else layer.q,
        )  # fmt: skip

    return call


def write_cache(step: Step, layer: Layer, k: Tensor, v: Tensor) -> None:
    from vllm import _custom_ops as ops

    stored = layer.cache.view(torch.uint8) if step.is_fp8 else layer.cache
    keys, values = stored.transpose(1, 2).split(HEAD_DIM, dim=-1)
    ops.reshape_and_cache_flash(
        k.unflatten(1, (-1, HEAD_DIM)) if k.ndim == 2 else k, v, keys, values, step.slots,
        "fp8" if step.is_fp8 else "auto", step.scale, step.scale,
    )  # fmt: skip


def round_queries(step: Step, layer: Layer, q: Tensor) -> None:
    from vllm import _custom_ops as ops

    if step.is_fp8:
        ops.scaled_fp8_quant(q, step.scale, output=layer.rounded_q)


def separate(step: Step) -> Call:
    from vllm import _custom_ops as ops

    def call(layer: Layer) -> None:
        q, k, v = step.parts(layer)
        new_q, new_k = layer.scratch
        for out, x, weight in ((new_q, q, layer.q_weight), (new_k, k, layer.k_weight)):
            if weight is not None:
                ops.rms_norm(out.unflatten(1, (-1, HEAD_DIM)), x, weight, EPSILON)
        if layer.q_weight is None:  # in place, as vLLM does
            new_q, new_k = q, k
        ops.rotary_embedding(step.positions, new_q, new_k, HEAD_DIM, step.cos_sin, True)
        round_queries(step, layer, new_q if new_q.ndim == 2 else new_q.flatten(1))
        write_cache(step, layer, new_k, v)

    return call


def fused_rope(step: Step) -> Call:
    from vllm import _custom_ops as ops

    def call(layer: Layer) -> None:
        if layer.q_weight is None or layer.k_weight is None:
            raise ValueError("fused_qk_norm_rope needs norms")
        ops.fused_qk_norm_rope(
            layer.qkv, step.heads, step.kv_heads, step.kv_heads, HEAD_DIM, EPSILON,
            layer.q_weight, layer.k_weight, step.cos_sin, True, step.positions,
        )  # fmt: skip
        q, k, v = step.parts(layer)
        round_queries(step, layer, q.flatten(1))
        write_cache(step, layer, k, v)

    return call


def inductor(step: Step) -> Call:
    """vLLM's torch code (vllm/ir/ops/layernorm.py, rotary_embedding/common.py), compiled."""

    def norm(x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        values = x.float()
        values = values * torch.rsqrt(values.pow(2).mean(dim=-1, keepdim=True) + EPSILON)
        return (values.to(weight.dtype) * weight).to(x.dtype)

    def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cosines - b * sines, b * cosines + a * sines), dim=-1)

    def torch_code(
        qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        by_head = qkv.unflatten(1, (-1, HEAD_DIM))
        q, k, _ = by_head.split([step.heads, step.kv_heads, step.kv_heads], dim=1)
        rows = step.cos_sin.index_select(0, step.positions)
        cosines, sines = rows.unsqueeze(1).chunk(2, dim=-1)
        q, k = rotate(norm(q, q_weight), cosines, sines), rotate(norm(k, k_weight), cosines, sines)
        if step.is_fp8:
            q = (q.float() * scale.reciprocal()).clamp(-448, 448).to(FP8)
        return q.flatten(1), k

    compiled = torch.compile(torch_code, dynamic=False)

    def call(layer: Layer) -> None:
        q, k = compiled(layer.qkv, layer.q_weight, layer.k_weight, step.scale)
        del q
        write_cache(step, layer, k, step.parts(layer)[2])

    return call


KERNELS: dict[str, Callable[[Step], Call]] = {
    "nibble": nibble,
    "separate": separate,
    "fused_qk_norm_rope": fused_rope,
    "inductor": inductor,
}

# --- times ----------------------------------------------------------------------------------------


def capture(call: Call, step: Step) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(step.layers[0])
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in step.layers:
            call(layer)
    return graph


def microseconds(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """Of one call: the median over rounds, in which the graphs take turns."""
    found: dict[str, list[float]] = {name: [] for name in graphs}
    start, end = torch.cuda.Event(True), torch.cuda.Event(True)
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            graph.replay()
            start.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            found[name].append(start.elapsed_time(end) * 1e3 / (CALLS * REPLAYS))
    return {name: round(statistics.median(times), 2) for name, times in found.items()}


def measure(tokens: int, heads: int, kv_heads: int, norms: bool, fp8: bool) -> dict[str, Any]:
    step, graphs = make_step(tokens, heads, kv_heads, norms, fp8), {}
    for name, make in KERNELS.items():
        if name == "fused_qk_norm_rope" and not norms:
            continue
        try:
            graphs[name] = capture(make(step), step)
        except Exception as error:  # a kernel that cannot run leaves the others
            print(name, repr(error)[:200], flush=True)
            if "CUDA" in repr(error):
                raise
    us = microseconds(graphs)
    others = [value for name, value in us.items() if name != "nibble"]
    return {
        "tokens": tokens,
        "heads": [heads, kv_heads],
        "head_dim": HEAD_DIM,
        "norms": norms,
        "kv": "fp8" if fp8 else "bf16",
        "us": us,
        "ratio": round(min(others) / us["nibble"], 2) if others and "nibble" in us else None,
    }


def about() -> dict[str, Any]:
    import vllm

    driver = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    return {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "gpu": subprocess.run(driver, capture_output=True, text=True, check=True).stdout.strip(),
        "torch": torch.__version__,
        "vllm": vllm.__version__,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--seconds", type=float, default=3600, help="stop after this time")
    return parser.parse_args()


def main() -> None:
    given = parse()
    torch.manual_seed(0)
    end = time.monotonic() + given.seconds
    result: dict[str, Any] = {**about(), "calls_in_a_graph": CALLS, "rows": []}
    for heads, kv_heads, norms in FORMS:
        for fp8 in (False, True):
            for tokens in given.tokens:
                if time.monotonic() > end:
                    return
                result["rows"].append(row := measure(tokens, heads, kv_heads, norms, fp8))
                print(json.dumps(row), flush=True)
                given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Times nibble's decode attention beside vLLM's kernels on one GPU, in turns, from CUDA graphs.

    python benchmarks/decode_attention.py --out FILE.json

Keys and values lie in vLLM 0.32's storage [pages, tokens, KV heads, 2 D], pages of 16 tokens drawn
at random from a pool. Each call of a graph reads other pages, and the second cache is emptied
before each replay. It needs vLLM with FlashAttention 3 and FlashInfer, which compiles its kernels
for a minute, and nibble-kernels compiled for this GPU. `--divisions` compares divisions of a
sequence in the same turns, and how many sequences clusters of blocks compute. Another process
computes: if a kernel ends it, the results name the kernel, and a new process goes on without it.
`--front` has the kernel before attention in front of each call, which writes queries and the last
token, and counts its time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
PAGE = 16
HEADS = {128: (32, 8), 256: (16, 2)}
GRID = (
    *((1, n) for n in (128, 1024, 2048, 8192, 32768, 131072)),
    *((4, n) for n in (1024, 8192)),
    *((8, n) for n in (128, 1024, 8192, 32768)),
    *((16, n) for n in (1024, 8192)),
    *((32, n) for n in (1024, 4096, 16384)),
    *((64, n) for n in (128, 1024, 8192)),
)
ROUNDS = 7
POOL_BYTES = 6 << 30
SILENCE = 30  # seconds after which a kernel that has begun hangs
Call = Callable[[Tensor], None]


@dataclass
class Batch:
    """One batch: `tables` are page tables of different pages."""

    head_dim: int
    batch: int
    context: int
    query: Tensor
    cache: Tensor  # [pages, tokens, KV heads, 2 D]
    tables: list[Tensor]
    lengths: Tensor
    begins: Tensor
    out: Tensor

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def is_fp8(self) -> bool:
        return self.cache.dtype == FP8

    @property
    def kv_bytes(self) -> int:
        heads = self.cache.shape[2]
        return self.batch * self.context * heads * 2 * self.head_dim * self.cache.element_size()


def read_bandwidth() -> float:
    """Bytes a second of torch's sum over 2 GB."""
    x = torch.ones(1 << 30, dtype=torch.float16, device="cuda")
    start, end = torch.cuda.Event(True), torch.cuda.Event(True)
    for _ in range(3):
        x.sum()
    start.record()
    for _ in range(10):
        x.sum()
    end.record()
    end.synchronize()
    return 10 * x.nbytes / (start.elapsed_time(end) / 1e3)


def make_pool(head_dim: int, dtype: torch.dtype) -> Tensor:
    row = HEADS[head_dim][1] * 2 * head_dim
    pages = POOL_BYTES // (PAGE * row * dtype.itemsize)
    pool = torch.empty(pages, PAGE, HEADS[head_dim][1], 2 * head_dim, device="cuda", dtype=dtype)
    some = (torch.randn(4096, *pool.shape[1:], device="cuda") * 0.5).to(dtype)
    for begin in range(0, pages, len(some)):
        part = pool[begin : begin + len(some)]
        part.copy_(some[: len(part)])
    return pool


def make_batch(pool: Tensor, batch: int, context: int, read: float) -> Batch:
    head_dim = pool.shape[-1] // 2
    width = -(-context // PAGE)
    heads = HEADS[head_dim][0]
    made = Batch(
        head_dim,
        batch,
        context,
        torch.randn(batch, heads, head_dim, device="cuda").bfloat16(),
        pool,
        [],
        torch.full((batch,), context, device="cuda", dtype=torch.int32),
        torch.arange(batch + 1, device="cuda", dtype=torch.int32),
        torch.empty(batch, heads, head_dim, device="cuda", dtype=torch.bfloat16),
    )
    wanted = min(64, max(3, int(3000 / (made.kv_bytes / read * 2e6 + 8))))
    copies = max(1, min(wanted, len(pool) // (width * batch)))
    order = torch.randperm(len(pool), device="cuda").int()[: copies * batch * width]
    made.tables = list(order.view(copies, batch, width))
    return made


# --- kernels --------------------------------------------------------------------------------------


def nibble(b: Batch, least_chunk: int, most_splits: int, most_clustered: int = -1) -> Call:
    from nibble_kernels.decode_attention import MOST_CLUSTERED, decode_attention, make_workspace

    heads, kv_heads = b.query.shape[1], b.cache.shape[2]
    workspace = make_workspace(
        b.batch, kv_heads, heads // kv_heads, b.head_dim,
        least_chunk=least_chunk, most_splits=most_splits,
        most_clustered=MOST_CLUSTERED if most_clustered < 0 else most_clustered,
    )  # fmt: skip
    cache = b.cache.transpose(1, 2)

    def call(table: Tensor) -> None:
        decode_attention(
            b.query, cache, table, b.lengths, b.begins, workspace, scale=b.scale, out=b.out,
            early=True,
        )  # fmt: skip

    return call


def fa3(b: Batch) -> Call:
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    heads, kv_heads = b.query.shape[1], b.cache.shape[2]
    k, v = b.cache.split(b.head_dim, dim=-1)
    dtype = FP8 if b.is_fp8 else torch.bfloat16
    q, most = b.query.to(dtype), max(40960, b.context)
    ones = torch.ones(1, device="cuda").expand(b.batch, kv_heads) if b.is_fp8 else None
    plan = get_scheduler_metadata(
        batch_size=b.batch, max_seqlen_q=1, max_seqlen_k=most, num_heads_q=heads,
        num_heads_kv=kv_heads, headdim=b.head_dim, cache_seqlens=b.lengths, qkv_dtype=dtype,
        cu_seqlens_q=b.begins, page_size=PAGE, causal=True, window_size=(-1, -1), num_splits=32,
    )  # fmt: skip

    def call(table: Tensor) -> None:
        flash_attn_varlen_func(
            q=q, k=k, v=v, out=b.out, cu_seqlens_q=b.begins, max_seqlen_q=1, seqused_k=b.lengths,
            max_seqlen_k=most, softmax_scale=b.scale, causal=True, block_table=table,
            scheduler_metadata=plan, fa_version=3, q_descale=ones, k_descale=ones, v_descale=ones,
            num_splits=32,
        )  # fmt: skip

    return call


def triton(b: Batch) -> Call:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    heads, kv_heads = b.query.shape[1], b.cache.shape[2]
    k, v = b.cache.split(b.head_dim, dim=-1)
    one = torch.ones(1, device="cuda") if b.is_fp8 else None
    rows, segments = max(128 // kv_heads, b.batch), 16
    sums = torch.empty(rows, heads, segments, b.head_dim, device="cuda")
    maxima, totals = (torch.empty(rows, heads, segments, device="cuda") for _ in range(2))

    def call(table: Tensor) -> None:
        unified_attention(
            q=b.query, k=k, v=v, out=b.out, cu_seqlens_q=b.begins, max_seqlen_q=1,
            seqused_k=b.lengths, max_seqlen_k=max(40960, b.context), softmax_scale=b.scale,
            causal=True, window_size=(-1, -1), block_table=table, softcap=0, q_descale=None,
            k_descale=one, v_descale=one, seq_threshold_3D=128 // kv_heads,
            num_par_softmax_segments=segments, softmax_segm_output=sums, softmax_segm_max=maxima,
            softmax_segm_expsum=totals,
        )  # fmt: skip

    return call


def flashinfer(b: Batch) -> Call:
    import flashinfer as fi

    width = b.tables[0].shape[1]
    k, v = b.cache.split(b.head_dim, dim=-1)
    begins = torch.arange(b.batch + 1, dtype=torch.int32, device="cuda") * width
    last = torch.full((b.batch,), (b.context - 1) % PAGE + 1, dtype=torch.int32, device="cuda")
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "NHD", use_cuda_graph=True,
        paged_kv_indptr_buffer=begins.clone(), paged_kv_last_page_len_buffer=last.clone(),
        paged_kv_indices_buffer=torch.empty(b.batch * width, dtype=torch.int32, device="cuda"),
        use_tensor_cores=True,
    )  # fmt: skip
    wrapper.plan(
        begins, b.tables[0].flatten(), last, b.query.shape[1], b.cache.shape[2], b.head_dim, PAGE,
        q_data_type=torch.bfloat16, kv_data_type=b.cache.dtype, sm_scale=b.scale,
    )  # fmt: skip
    pages = wrapper._paged_kv_indices_buf  # its table of pages; a call has another one

    def call(table: Tensor) -> None:
        wrapper._paged_kv_indices_buf = table.flatten()
        wrapper.run(b.query, (k, v), out=b.out)
        wrapper._paged_kv_indices_buf = pages

    return call


OTHERS: dict[str, Callable[[Batch], Call]] = {
    "fa3": fa3,
    "flashinfer": flashinfer,
    "triton": triton,
}


def after_front(b: Batch, call: Call, rounds_queries: bool) -> Call:
    """The call with nibble's kernel before attention in front of it. FlashAttention 3 takes the
    queries rounded to FP8 with an FP8 cache; it reads others then, of which the time is the same.
    """
    from nibble_kernels.attention_front import attention_front

    heads, kv_heads = b.query.shape[1], b.cache.shape[2]
    qkv = torch.randn(b.batch, (heads + 2 * kv_heads) * b.head_dim, device="cuda").bfloat16()
    cos_sin = torch.randn(b.context, b.head_dim, device="cuda").bfloat16()
    positions = torch.full((b.batch,), b.context - 1, device="cuda")
    last = {table.data_ptr(): table[:, (b.context - 1) // PAGE].long() * PAGE for table in b.tables}
    slots = {place: first + (b.context - 1) % PAGE for place, first in last.items()}
    one = torch.ones(1, device="cuda") if b.is_fp8 else None
    q = torch.empty_like(b.query, dtype=FP8) if rounds_queries else b.query

    def both(table: Tensor) -> None:
        attention_front(
            qkv, positions, cos_sin, heads=heads, kv_heads=kv_heads,
            slots=slots[table.data_ptr()], cache=b.cache.transpose(1, 2), k_scale=one, v_scale=one,
            q_scale=one if rounds_queries else None, out=q.flatten(1),
        )  # fmt: skip
        call(table)

    return both


# --- times ----------------------------------------------------------------------------------------


def capture(call: Call, tables: list[Tensor]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(tables[0])
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for table in tables:
            call(table)
    return graph


def microseconds(
    graphs: dict[str, torch.cuda.CUDAGraph], calls: int, begins: Callable[[str], None]
) -> dict[str, float]:
    evict = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    found: dict[str, list[float]] = {name: [] for name in graphs}
    start, end = torch.cuda.Event(True), torch.cuda.Event(True)
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            evict.zero_()
            begins(name)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found[name].append(start.elapsed_time(end) * 1e3 / calls)
    return {name: round(statistics.median(times), 2) for name, times in found.items()}


def measure(
    b: Batch, calls: dict[str, Call], read: float, begins: Callable[[str], None]
) -> dict[str, Any]:
    """A row of the JSON: times, and the largest difference from the first kernel's result. It says
    which kernel begins.
    """
    graphs, results = {}, {}
    for name, call in calls.items():
        begins(name)
        try:
            call(b.tables[0])
            results[name] = b.out.float().clone()
            torch.cuda.synchronize()
            graphs[name] = capture(call, b.tables)
        except Exception as error:  # a kernel that cannot run leaves the others
            print(name, repr(error)[:200], flush=True)
            if "CUDA" in repr(error) or "cuda" in repr(error):
                raise
    us = microseconds(graphs, len(b.tables), begins)
    first = next(iter(results.values()))
    apart = {name: float((found - first).abs().max()) for name, found in results.items()}
    least = b.kv_bytes / read * 1e6
    ours, best = us.get("nibble"), min((us[name] for name in OTHERS if name in us), default=None)
    return {
        "batch": b.batch,
        "context": b.context,
        "head_dim": b.head_dim,
        "heads": list(HEADS[b.head_dim]),
        "kv": "fp8" if b.is_fp8 else "bf16",
        "us": us,
        "ratio": round(best / ours, 3) if best and ours else None,
        "percent_of_read": round(100 * least / ours, 1) if ours else None,
        "max_difference": round(max(apart.values()), 5),
        "apart": {name: round(value, 5) for name, value in apart.items()},
    }


def about(read: float) -> dict[str, Any]:
    versions = {"torch": torch.__version__}
    for name in ("vllm", "flashinfer", "triton"):
        try:
            versions[name] = __import__(name).__version__
        except Exception as error:
            versions[name] = repr(error)[:80]
    driver = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    return {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "gpu": subprocess.run(driver, capture_output=True, text=True, check=True).stdout.strip(),
        "read_bytes_per_s": round(read),
        **versions,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3600, help="stop after this time")
    parser.add_argument("--others", nargs="*", choices=OTHERS, default=list(OTHERS))
    parser.add_argument("--head-dims", nargs="*", type=int, default=[256, 128])
    parser.add_argument("--kv", nargs="*", choices=("fp8", "bf16"), default=["fp8", "bf16"])
    parser.add_argument("--grid", nargs="*", metavar="BATCHxCONTEXT", help="batches in this order")
    parser.add_argument(
        "--forms", nargs="*", metavar="KV:HEAD_DIM", help="in this order, in place of the products"
    )
    parser.add_argument(
        "--divisions",
        nargs="*",
        default=["nibble=128,64"],
        help="NAME=LEAST_CHUNK,MOST_SPLITS[,MOST_CLUSTERED]",
    )
    parser.add_argument("--front", action="store_true", help="count the kernel before attention")
    return parser.parse_args()


@dataclass
class Task:
    """A batch that is left to measure."""

    kv: str
    head_dim: int
    batch: int
    context: int


def compute(
    messages: Connection, tasks: list[Task], divisions: dict[str, list[int]], others: list[str],
    without: set[str], front: bool,
) -> None:  # fmt: skip
    """Send what begins, and rows."""
    torch.manual_seed(0)
    read = read_bandwidth()
    messages.send(("about", about(read)))
    form, pool = None, None
    for task in tasks:
        if form != (task.kv, task.head_dim):
            form, pool = (task.kv, task.head_dim), None
            torch.cuda.empty_cache()
            pool = make_pool(task.head_dim, FP8 if task.kv == "fp8" else torch.bfloat16)
        assert pool is not None
        b = make_batch(pool, task.batch, task.context, read)
        calls = {name: nibble(b, *values) for name, values in divisions.items()}
        calls |= _others(b, others)
        calls = {name: call for name, call in calls.items() if name not in without}
        if front:
            calls = {
                name: after_front(b, call, name == "fa3" and b.is_fp8)
                for name, call in calls.items()
            }
        row = measure(b, calls, read, lambda name: messages.send(("begins", name)))
        messages.send(("row", row))


def main() -> None:
    given = parse()
    end = time.monotonic() + given.seconds
    divisions = {
        name: [int(n) for n in values.split(",")]
        for name, _, values in (one.partition("=") for one in given.divisions)
    }
    forms = given.forms or [f"{kv}:{dim}" for kv in given.kv for dim in given.head_dims]
    grid = [tuple(int(n) for n in one.split("x")) for one in given.grid or ()] or GRID
    tasks = [
        Task(kv, int(dim), batch, context)
        for kv, _, dim in (form.partition(":") for form in forms)
        for batch, context in grid
    ]
    result: dict[str, Any] = {
        "divisions": divisions,
        "front": given.front,
        "failed": [],
        "rows": [],
    }
    without: set[str] = set()
    processes = multiprocessing.get_context("spawn")
    while tasks and time.monotonic() < end:
        ours, theirs = processes.Pipe(duplex=False)
        process = processes.Process(
            target=compute, args=(theirs, tasks, divisions, given.others, without, given.front)
        )
        process.start()
        theirs.close()
        name = ""
        while True:
            left = end - time.monotonic()
            try:
                if not ours.poll(max(0, min(left, SILENCE) if name else left)):
                    break
                kind, value = ours.recv()
            except EOFError:
                process.join()
                break
            if kind == "begins":
                name = value
            elif kind == "about":
                result = value | result
            else:
                result["rows"].append(value)
                name, tasks = "", tasks[1:]
                print(json.dumps(value), flush=True)
                given.out.write_text(json.dumps(result, indent=1) + "\n")
        process.kill()
        if process.exitcode == 0 or time.monotonic() > end:
            return
        if not name:
            raise SystemExit("the process ended before a kernel began")
        result["failed"].append({"name": name, **vars(tasks[0])})
        print("failed", name, tasks[0], flush=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n")
        without.add(name)


def _others(b: Batch, names: list[str]) -> dict[str, Call]:
    calls = {}
    for name in names:
        try:
            calls[name] = OTHERS[name](b)
        except Exception as error:
            print(name, repr(error)[:200], flush=True)
    return calls


if __name__ == "__main__":
    main()

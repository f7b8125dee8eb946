"""Tokens per second and time to first token: `vllm serve` beside `nibble serve`, default settings.

    python benchmarks/serve_load.py --write FOLDER [--shape 8b]         write a model's shape, W4A4
    python benchmarks/serve_load.py --model FOLDER [--measure-s 60] [--when FILE …] [--logs DIR]
        [--streams 1 4 …] [--prompts 8 64 …] [--sampling '{"temperature": 0.7, "top_p": 0.9}']
        [--out benchmarks/results/serve_load_8b_h200.json]

--shape 30b-a3b has Qwen3-30B-A3B's experts, 35b-a3b those of Qwen3.6-35B-A3B with its linear
attention, whose products are FP8 as in the published checkpoint.

Both servers run at the same time on one GPU and answer in turns. Each gets its KV cache in bytes
and a part of the memory, so that both fit, and a port from LOAD_FIRST_PORT (9111) on. The model has
random weights, so nibble's canary and kernel assertion warn, and no reference is computed
(NIBBLE_CANARY=off also skips the canary). Nothing else is set.

A round asks each server once for each row, and every second round begins with the other server.
With several streams, each sends one request of 256 tokens in and 256 out at the same moment. The
rows of `--prompts` send requests of one stream one after the other, 8 tokens out. Rounds go on
for `--measure-s` seconds; the first one is whole. `tokens_per_s` are the tokens of all rounds over
their seconds, from the first request to the last token. `ttft_ms` and `tpot_ms` are medians over
requests: of the time to the first token, and of (last - first token) / (tokens - 1). `ratio` is
nibble's tokens per second over stock's, `ttft_ratio` nibble's time to first token over stock's.
Every prompt is new, so no prefix is cached. Requests are greedy without `--sampling`. `--when`
delays the measurement, but not the starts, until these files exist.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from host_floor import SHAPES, wait_until_ready, write_shape  # noqa: E402
from machine import machine  # noqa: E402
from start_time import describe_model  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "serve_load_8b_h200.json"
STREAMS, TOKENS = (1, 4, 8, 16, 32, 64), 256
PROMPTS, PROMPT_OUT, PROMPT_REQUESTS = (8, 64, 256, 512, 1024, 2048, 8192), 8, 8
TOKEN_IDS = (300, 1000)  # also in the vocabulary of the embedded demo
WARM_OUT = 64  # tokens of a row's first requests, which compile and capture
SIDES = ("stock", "nibble")
FIRST_PORT = int(os.environ.get("LOAD_FIRST_PORT", "9111"))  # several may run on one machine
PORTS = {"stock": FIRST_PORT, "nibble": FIRST_PORT + 1}
CONTROL_PORT = FIRST_PORT + 2
GOALS = {
    "dense": {1: 2.0, 4: 2.0, 8: 1.9, 16: 1.8, 32: 1.5, 64: 1.25},
    "experts": {1: 1.6, 4: 1.5, 8: 1.5, 16: 1.35, 32: 1.35, 64: 1.35},
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--streams", nargs="*", type=int, default=list(STREAMS))
    parser.add_argument("--prompts", nargs="*", type=int, default=list(PROMPTS))
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the streams, in and out")
    parser.add_argument("--sampling", type=json.loads, default={"temperature": 0})
    parser.add_argument("--measure-s", type=float, default=60.0)
    parser.add_argument("--when", nargs="*", type=Path, default=[])
    parser.add_argument("--kv-bytes", type=int, default=8 << 30)
    parser.add_argument("--memory-share", default="0.3", help="of the GPU, for each server")
    parser.add_argument("--logs", type=Path, default=Path("/tmp"))
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.write:
        write_shape(options.write, options.shape)
    if not options.model:
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the servers
    result = {
        "what": "tokens/s, time to first token and time between tokens, in turns on one GPU",
        "command": " ".join(["python", "benchmarks/serve_load.py", *sys.argv[1:]]),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("NIBBLE_", "VLLM_"))},
        "commit": options.commit,
        "model": describe_model(options.model),
        "machine": machine(),
        "goals": {"ratio": goals_of(options.model), "ttft_ratio": 1.0},
    }
    servers: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for side in SIDES:
            servers[side] = start(side, options)
        for side, server in servers.items():
            wait_until_ready(PORTS[side], server)
        wait_for_files(options.when)
        result["nibble_decided"] = decided()
        for rows in measured(rows_of(options), options.measure_s):
            write(options.out, result | {"steps": steps(), "rows": rows})
    finally:
        stop(servers)
    print(json.dumps(json.loads(options.out.read_text())["rows"], indent=1))
    return 0


def goals_of(model: Path) -> dict[int, float]:
    config = json.loads((model / "config.json").read_text())
    return GOALS["experts" if config.get("num_experts") else "dense"]


# --- servers --------------------------------------------------------------------------------------


def start(side: str, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    environ = dict(os.environ) | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    model, port, kv_bytes = str(options.model), str(PORTS[side]), str(options.kv_bytes)
    if side == "stock":
        words = ["-P", "-m", "vllm.entrypoints.cli.main", "serve", model, "--port", port]
        words += ["--served-model-name", "default", "--kv-cache-memory-bytes", kv_bytes]
        words += ["--gpu-memory-utilization", options.memory_share]
        environ = {k: v for k, v in environ.items() if not k.startswith("NIBBLE_")}
        environ["VLLM_PLUGINS"] = ""
    else:
        words = ["-m", "nibble", "serve", model]
        random_weights = {
            "NIBBLE_CANARY": "warn",
            "NIBBLE_REFERENCE": "off",
            "NIBBLE_KERNEL_ASSERTION": "warn",
        }
        environ = random_weights | environ
        environ |= {"PORT": port, "NIBBLE_CONTROL_PORT": str(CONTROL_PORT)}
        environ |= {"NIBBLE_KV_CACHE_BYTES": kv_bytes, "GPU_MEMORY_UTIL": options.memory_share}
    with (options.logs / f"load_{side}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def stop(servers: Mapping[str, subprocess.Popen[bytes]]) -> None:
    for server in servers.values():
        server.send_signal(signal.SIGTERM)
    for server in servers.values():
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


def wait_for_files(paths: list[Path]) -> None:
    while not all(path.exists() for path in paths):
        time.sleep(0.2)


def fetched(port: int, path: str) -> str:
    """A page of nibble's; empty if there is none."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as page:
            return page.read().decode()
    except OSError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return ""


def decided() -> dict[str, Any]:
    """What nibble planned and which kernels it saw, from its /status."""
    status = json.loads(fetched(CONTROL_PORT, "/status") or "{}")
    plan = status.get("plan", {})
    return {
        "linear_kernel": plan.get("choices", {}).get("linear_kernel"),
        "command": plan.get("command"),
        "assertion": status.get("assertion"),
        "canary": status.get("canary"),
    }


def steps() -> dict[str, float]:
    """nibble's counters of steps, if it has any."""
    lines = fetched(PORTS["nibble"], "/metrics").splitlines()
    counted = [line.rpartition(" ") for line in lines if line.startswith("nibble_engine_steps")]
    return {name: float(value) for name, _, value in counted}


# --- load -----------------------------------------------------------------------------------------


@dataclass
class Row:
    """One row and what each side's rounds took."""

    streams: int
    tokens_in: int
    tokens_out: int
    sampling: dict[str, Any]
    requests: int = 1  # of a stream, one after the other
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SIDES, 0.0))
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SIDES, 0))
    ttft: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    tpot: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})

    def of(self, side: str) -> dict[str, float]:
        return {
            "tokens_per_s": round(self.tokens[side] / self.seconds[side], 1),
            "ttft_ms": round(1e3 * statistics.median(self.ttft[side]), 2),
            "tpot_ms": round(1e3 * statistics.median(self.tpot[side]), 3),
        }

    def described(self) -> dict[str, Any]:
        stock, nibble = (self.of(side) for side in SIDES)
        return {
            "streams": self.streams,
            "prompt_tokens": self.tokens_in,
            "output_tokens": self.tokens_out,
            "stock": stock,
            "nibble": nibble,
            "ratio": round(nibble["tokens_per_s"] / stock["tokens_per_s"], 3),
            "ttft_ratio": round(nibble["ttft_ms"] / stock["ttft_ms"], 3),
            "requests": len(self.ttft["nibble"]),
        }


def rows_of(options: argparse.Namespace) -> list[Row]:
    tokens, sampling = options.tokens, options.sampling
    return [
        *(Row(streams, tokens, tokens, sampling) for streams in options.streams),
        *(Row(1, prompt, PROMPT_OUT, sampling, PROMPT_REQUESTS) for prompt in options.prompts),
    ]


def measured(rows: list[Row], limit_s: float) -> Iterator[list[dict[str, Any]]]:
    """The rows after each step of a round, as far as they are measured."""
    for row in rows:
        for side in SIDES:
            warm = Row(row.streams, row.tokens_in, min(row.tokens_out, WARM_OUT), row.sampling)
            asyncio.run(ask(warm, side, 0))
    end = time.monotonic() + limit_s
    number = 0
    while number == 0 or time.monotonic() < end:
        number += 1
        for row in rows:
            for side in SIDES if number % 2 else reversed(SIDES):
                asyncio.run(ask(row, side, number))
            print(f"round {number}: {json.dumps(row.described())}", flush=True)
            yield [one.described() for one in rows if all(one.ttft.values())]
            if number > 1 and time.monotonic() > end:
                return


async def ask(row: Row, side: str, number: int) -> None:
    """All streams of a round at the same moment."""
    import aiohttp

    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        began = time.perf_counter()
        streams = (stream(session, row, side, f"{number} {i}") for i in range(row.streams))
        await asyncio.gather(*streams)
        row.seconds[side] += time.perf_counter() - began
    row.tokens[side] += row.streams * row.requests * row.tokens_out


async def stream(session: Any, row: Row, side: str, name: str) -> None:
    """One stream's requests. Both sides get the same prompts."""
    for request in range(row.requests):
        rng = random.Random(f"{name} {request} {row.streams} {row.tokens_in} {row.tokens_out}")
        body = {
            "model": "default",
            "prompt": [rng.randrange(*TOKEN_IDS) for _ in range(row.tokens_in)],
            "max_tokens": row.tokens_out,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | row.sampling
        began = time.perf_counter()
        first = last = 0.0
        end = b""
        url = f"http://127.0.0.1:{PORTS[side]}/v1/completions"
        async with session.post(url, json=body) as response:
            if response.status != 200:
                raise SystemExit(f"{side}: {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    end = line
                    if b'"choices":[]' not in line:
                        last = time.perf_counter()
                        first = first or last
        if b'"completion_tokens":%d' % row.tokens_out not in end:
            raise SystemExit(f"{side}: expected {row.tokens_out} tokens: {end.decode()[:300]}")
        row.ttft[side].append(first - began)
        row.tpot[side].append((last - first) / (row.tokens_out - 1))


def write(path: Path, result: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())

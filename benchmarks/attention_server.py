"""A server with nibble's decode attention beside one with vLLM's: step times, and greedy answers.

    python benchmarks/attention_server.py --model FOLDER [--compare attention|auto|few|front]
        [--kv auto fp8] [--streams 1 8 32]
        [--contexts 256 8192] [--rounds 3] [--questions models/demo_questions.jsonl]
        [--logs DIR] [--out FILE.json]

Both are `nibble serve` with default settings but NIBBLE_ATTENTION, run at the same time on one GPU
and answer in turns. `--compare few` and `auto` take that value in place of `nibble`: steps of few
requests differ from `vllm`'s, with `auto` where its plan says so. `--compare front` compares
NIBBLE_ATTENTION_FRONT on (`nibble`) with off (`vllm`). Each gets a KV cache for the largest row.
For each row, all streams send a prompt of their own of `context` tokens at the same moment, 512
tokens out. The first round fills the prefix cache. `step_ms` is the median over streams and the
other rounds of (last token - last stream's first token) / tokens after it: the time of a step with
all streams. `ratio` is vLLM's over nibble's. `equal` is the share of streams whose greedy tokens
are those of the other server.

`--questions` asks each question of a file once of both, greedily, and counts equal and right
answers; the rows are omitted. Exit code 1 if an answer differs.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from host_floor import wait_until_ready  # noqa: E402
from machine import machine  # noqa: E402
from serve_load import fetched, stop  # noqa: E402
from start_time import describe_model  # noqa: E402

SIDES = ("vllm", "nibble")
FIRST_PORT = int(os.environ.get("ATTENTION_FIRST_PORT", "9501"))
# What differs between the two, by --compare.
VARIABLES = {
    "attention": ("NIBBLE_ATTENTION", {side: side for side in SIDES}),
    "auto": ("NIBBLE_ATTENTION", {"vllm": "vllm", "nibble": "auto"}),
    "few": ("NIBBLE_ATTENTION", {"vllm": "vllm", "nibble": "few"}),
    "front": ("NIBBLE_ATTENTION_FRONT", {"vllm": "off", "nibble": "on"}),
}
PORTS = {side: FIRST_PORT + 2 * i for i, side in enumerate(SIDES)}
TOKEN_IDS = (300, 1000)  # also in the vocabulary of the embedded demo
TOKENS_OUT = 512


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--compare", choices=VARIABLES, default="attention")
    parser.add_argument("--kv", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--contexts", nargs="+", type=int, default=[256, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--memory-share", default="0.45", help="of the GPU, for each server")
    parser.add_argument("--logs", type=Path, default=Path("/tmp"))
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=Path("/tmp/attention_server.json"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the servers
    result: dict[str, Any] = {
        "what": f"nibble's {options.compare} beside vLLM's in nibble serve, in turns on one GPU",
        "command": " ".join(["python", "benchmarks/attention_server.py", *sys.argv[1:]]),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("NIBBLE_", "VLLM_"))},
        "commit": options.commit,
        "model": describe_model(options.model),
        "machine": machine(),
    }
    servers: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for side in SIDES:
            servers[side] = start(side, options)
            if options.questions:  # each measures the memory that is left for its KV cache
                wait_until_ready(PORTS[side], servers[side])
        for side, server in servers.items():
            wait_until_ready(PORTS[side], server)
        result["decided"] = {side: decided(side) for side in SIDES}
        if options.questions:
            result["answers"] = compared(options.questions)
        else:
            result["rows"] = []
            for context in options.contexts:
                for streams in options.streams:
                    result["rows"].append(measured(streams, context, options.rounds))
                    print(json.dumps(result["rows"][-1]), flush=True)
                    options.out.write_text(json.dumps(result, indent=2) + "\n")
        result["steps"] = {side: steps(side) for side in SIDES}
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    finally:
        stop(servers)
    return int(bool(result.get("answers", {}).get("different")))


# --- servers --------------------------------------------------------------------------------------


def start(side: str, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    defaults = {
        "NIBBLE_CANARY": "warn",
        "NIBBLE_REFERENCE": "off",
        "NIBBLE_KERNEL_ASSERTION": "warn",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    name, values = VARIABLES[options.compare]
    environ = defaults | dict(os.environ) | {name: values[side], "PORT": str(PORTS[side])}
    environ |= {"NIBBLE_CONTROL_PORT": str(PORTS[side] + 1)}
    environ |= {"GPU_MEMORY_UTIL": options.memory_share}
    words = ["-m", "nibble", "serve", str(options.model)]
    words += ["--kv-cache-dtype", options.kv] if options.kv != "auto" else []
    if not options.questions:
        longest = max(options.contexts) + TOKENS_OUT
        tokens = max(options.streams) * (longest + 64) * 5 // 4
        environ |= {"NIBBLE_KV_CACHE_BYTES": str(tokens * token_bytes(options.model, options.kv))}
        words += ["--max-model-len", str(longest + 64)]
    with (options.logs / f"attention_{side}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def token_bytes(model: Path, kv: str) -> int:
    """What a token takes in the KV cache."""
    config = json.loads((model / "config.json").read_text())
    heads, layers = config["num_key_value_heads"], config["num_hidden_layers"]
    return layers * heads * config["head_dim"] * 2 * (1 if kv == "fp8" else 2)


def decided(side: str) -> dict[str, Any]:
    """What nibble planned, and which kernels it saw, from its /status."""
    status = json.loads(fetched(PORTS[side] + 1, "/status") or "{}")
    choices = status.get("plan", {}).get("choices", {})
    names = ("attention", "attention_front", "step_graph", "linear_kernel")
    found = {name: choices.get(name) for name in names}
    return {**found, "assertion": status.get("assertion"), "canary": status.get("canary")}


def steps(side: str) -> dict[str, float]:
    """Counters of steps from graphs, if there are any."""
    lines = fetched(PORTS[side], "/metrics").splitlines()
    counted = [line.rpartition(" ") for line in lines if line.startswith("nibble_engine_steps")]
    return {name: float(value) for name, _, value in counted if float(value)}


# --- step times -----------------------------------------------------------------------------------


def measured(streams: int, context: int, rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    texts: dict[str, list[str]] = {}
    for number in range(rounds + 1):
        for side in SIDES if number % 2 else reversed(SIDES):
            found = asyncio.run(ask_all(PORTS[side], streams, context))
            texts[side] = [text for _, text in found]
            if number:
                times[side] += step_times([stamps for stamps, _ in found])
    if not all(times.values()):
        return {"streams": streams, "context": context, "step_ms": None}  # never all at once
    ours, other = (round(1e3 * statistics.median(times[side]), 3) for side in ("nibble", "vllm"))
    equal = [a == b for a, b in zip(*texts.values(), strict=True)]
    return {
        "streams": streams,
        "context": context,
        "step_ms": {"vllm": other, "nibble": ours},
        "spread_ms": {side: round(1e3 * statistics.pstdev(times[side]), 3) for side in SIDES},
        "ratio": round(other / ours, 3),
        "equal": round(sum(equal) / len(equal), 3),
    }


def step_times(streams: list[list[float]]) -> list[float]:
    """Seconds a step of each stream, from when all of them decode."""
    begin = max(stamps[0] for stamps in streams)
    found = []
    for stamps in streams:
        later = [stamp for stamp in stamps if stamp >= begin]
        if len(later) > TOKENS_OUT // 4:
            found.append((later[-1] - later[0]) / (len(later) - 1))
    return found


async def ask_all(port: int, streams: int, context: int) -> list[tuple[list[float], str]]:
    import aiohttp

    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        asked = (ask(session, port, f"{i} {streams} {context}", context) for i in range(streams))
        return await asyncio.gather(*asked)


async def ask(session: Any, port: int, name: str, context: int) -> tuple[list[float], str]:
    """When each token came, and the text."""
    rng = random.Random(name)
    body = {
        "model": "default",
        "prompt": [rng.randrange(*TOKEN_IDS) for _ in range(context)],
        "max_tokens": TOKENS_OUT,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    stamps, text = [], ""
    async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as response:
        if response.status != 200:
            raise SystemExit(f"{port}: {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                stamps.append(time.perf_counter())
                text += json.loads(line[6:])["choices"][0]["text"]
    return stamps, text


# --- answers --------------------------------------------------------------------------------------


def compared(questions: Path) -> dict[str, Any]:
    """Greedy answers of both servers to each question."""
    asked = [json.loads(line) for line in questions.read_text().splitlines() if line]
    found: dict[str, list[str]] = {side: [] for side in SIDES}
    for one in asked:
        for side in SIDES:
            found[side].append(answer(PORTS[side], one["question"]))
    pairs = list(zip(asked, *found.values(), strict=True))
    return {
        "questions": len(asked),
        "right": {
            side: sum(one["answer"] == text for one, text in zip(asked, texts, strict=True))
            for side, texts in found.items()
        },
        "different": [
            {"question": one["question"], "vllm": theirs, "nibble": ours}
            for one, theirs, ours in pairs
            if theirs != ours
        ],
    }


def answer(port: int, question: str) -> str:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 128,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]["content"]


if __name__ == "__main__":
    sys.exit(main())

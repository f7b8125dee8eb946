"""Tokens a second that one API server carries: `vllm serve` beside `nibble serve`, both with an
engine of no cost (free_engine.py).

    .venv/bin/python benchmarks/api_server.py [--streams 64 256] [--rounds 3] [--tokens 256]
        [--out benchmarks/results/api_server_cpu.json]

Both servers run at the same time and answer in turns; in every second round the other begins. Each
stream asks for one streamed chat answer of `--tokens` tokens. A step of the engine takes
`--step-ms`, slow enough for every token to be an event of its own: `events_per_token` is near 1;
below it tokens were joined because the server was behind. `us_per_token` is the processor time that
the API server's process takes for a token, and `tokens_per_core_s` its inverse, which says what one
API server carries. `ratio` is stock's time over nibble's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from machine import machine  # noqa: E402
from start_overhead import answers, child_environ  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "api_server_cpu.json"
SIDES = ("stock", "nibble")
MAX_STREAMS = 256
FREE = ("--worker-cls", "free_engine.FreeWorker", "--max-num-seqs", str(MAX_STREAMS))
START_S = 180


@dataclass(frozen=True)
class Server:
    """A running server; `api` is its API server's process."""

    port: int
    api: psutil.Process

    def cpu_s(self) -> float:
        times = self.api.cpu_times()
        return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, started(Path(folder), options.step_ms) as servers:
        rows = [
            row(servers, streams, options.tokens, options.rounds) for streams in options.streams
        ]
    result = {
        "what": "tokens a second that one API server carries, with an engine of no cost",
        "command": " ".join([".venv/bin/python", "benchmarks/api_server.py", *sys.argv[1:]]),
        "machine": machine("uvloop", "httptools", "pydantic"),
        "tokens_a_stream": options.tokens,
        "step_ms": options.step_ms,
        "rounds": options.rounds,
        "rows": rows,
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(rows, indent=2))


def row(servers: dict[str, Server], streams: int, tokens: int, rounds: int) -> dict[str, Any]:
    """All rounds of one number of streams; the first, unmeasured, warms both up."""
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(-1, rounds):
        for side in SIDES if number % 2 else reversed(SIDES):
            measured = measure(servers[side], streams, tokens)
            if number >= 0:
                found[side].append(measured)
    medians = {
        side: {
            name: round(statistics.median(one[name] for one in found[side]), 3)
            for name in found[side][0]
        }
        for side in SIDES
    }
    ratio = medians["stock"]["us_per_token"] / medians["nibble"]["us_per_token"]
    return {"streams": streams, **medians, "ratio": round(ratio, 3)}


def measure(server: Server, streams: int, tokens: int) -> dict[str, float]:
    cpu_s, began = server.cpu_s(), time.monotonic()
    events = sum(asyncio.run(ask_all(server.port, streams, tokens)))
    wall_s, cpu_s = time.monotonic() - began, server.cpu_s() - cpu_s
    count = streams * tokens
    return {
        "tokens_per_s": count / wall_s,
        "us_per_token": cpu_s / count * 1e6,
        "tokens_per_core_s": count / cpu_s,
        "events_per_token": events / count,
    }


async def ask_all(port: int, streams: int, tokens: int) -> list[int]:
    return await asyncio.gather(*(ask(port, number, tokens) for number in range(streams)))


async def ask(port: int, number: int, tokens: int) -> int:
    """The number of events with text of one streamed answer."""
    body = json.dumps(
        {
            "model": "default",
            "messages": [{"role": "user", "content": f"Tell me about the number {number}."}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    events, ended, rest = 0, False, b""
    while chunk := await reader.read(1 << 16):
        rest += chunk
        *whole, rest = rest.split(b"\n\n")
        events += sum(b'"content":"' in one for one in whole)
        ended = ended or any(b"[DONE]" in one for one in whole)
    writer.close()
    if not ended:
        sys.exit(f"a stream on port {port} ended early: {rest[:300]!r}")
    return events - 1  # the first has the role and an empty content


@contextmanager
def started(folder: Path, step_ms: float) -> Iterator[dict[str, Server]]:
    """Both servers, ready: the default model, whose weights the engine does not read."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        servers = {}
        for side in SIDES:
            environ = child_environ(folder / side) | {
                "PYTHONPATH": str(ROOT / "benchmarks"),
                "FREE_ENGINE_STEP_MS": str(step_ms),
                "NIBBLE_CANARY": "off",
                "NIBBLE_REFERENCE": "off",
                # Of the model that earlier starts fetched
                "NIBBLE_CACHE_DIR": os.environ.get("NIBBLE_CACHE_DIR")
                or str(Path.home() / ".cache/nibble"),
            }
            with (folder / f"{side}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        command(side, environ),
                        env=environ,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
            servers[side] = ready(int(environ["PORT"]), processes[-1], folder / f"{side}.log")
        yield servers
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(60)


def command(side: str, environ: dict[str, str]) -> list[str]:
    """`nibble serve`, or `vllm serve` with the flags of its plan and without the gate."""
    nibble = str(ROOT / ".venv" / "bin" / "nibble")
    if side == "nibble":
        return [nibble, "serve", "--", *FREE]
    plan = json.loads(
        subprocess.run(
            [nibble, "plan", "--json", "--", *FREE], env=environ, check=True, capture_output=True
        ).stdout
    )
    environ |= {name: value["value"] for name, value in plan["env"].items() if "VLLM" in name}
    words = plan["command"][1:]
    gate = words.index("--middleware")
    words = [*words[:gate], *words[gate + 2 :]]
    return [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", *words]


def ready(port: int, process: subprocess.Popen[bytes], log: Path) -> Server:
    began = time.monotonic()
    while not answers(port):
        if process.poll() is not None or time.monotonic() - began > START_S:
            sys.exit(f"no answer on port {port}: {log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.5)
    (pid,) = {
        one.pid
        for one in psutil.net_connections("tcp")
        if one.laddr and one.laddr.port == port and one.status == psutil.CONN_LISTEN and one.pid
    }
    return Server(port, psutil.Process(pid))


if __name__ == "__main__":
    main()

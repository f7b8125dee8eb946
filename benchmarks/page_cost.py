"""Measures what an open status page costs a server, on this machine.

    python benchmarks/page_cost.py [--streams 64] [--rounds 8] [--seconds 8] [--factor 25]

Starts the NVFP4 demo, then alternates rounds without and with pages. A page asks /nibble/live every
2 s through the gate, and nibble then reads vLLM's metrics. Two figures:

- generated tokens a second with all streams busy. What one page takes is less than the noise of a
  round. So `--factor` times as many questions and readings of the metrics come in the rounds with
  pages, and a page's loss is that part of theirs.
- processor time of the server's processes while it is idle, with one page.

Writes benchmarks/results/page_cost.json.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from machine import machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.servers.serving import Server

RESULT = Path(__file__).parent / "results" / "page_cost.json"
POLL_S = 2.0
IDLE_ROUNDS, IDLE_S = 3, 10.0
LIMIT_PERCENT = 0.5
# nibble with a shorter time between two readings of vLLM's metrics, which all pages share
START = (
    "import os, sys, nibble.serve.traffic as traffic;"
    "traffic.CACHE_S /= float(os.environ.pop('PAGE_COST_FACTOR'));"
    "from nibble.cli.app import main; sys.argv[0] = 'nibble'; main()"
)


def ask(port: int, path: str, body: Any = None) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json"}
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data, headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.status
        return answer.read()


@contextlib.contextmanager
def open_page(port: int, is_open: bool, factor: float = 1.0) -> Iterator[None]:
    """A page that polls while the block runs, `factor` times as often as a real one."""
    over = threading.Event()

    def poll() -> None:
        due = time.monotonic()
        while not over.wait(max(0.0, due - time.monotonic())):
            ask(port, "/nibble/live")
            due += POLL_S / factor

    thread = threading.Thread(target=poll)
    if is_open:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if is_open:
            thread.join()


def tokens_per_s(port: int, streams: int, seconds: float) -> float:
    """Generated tokens a second with `streams` requests at all times."""
    until = time.monotonic() + seconds

    def one(_: int) -> int:
        count = 0
        while time.monotonic() < until:
            body = {"model": "default", "prompt": "What", "max_tokens": 64, "ignore_eos": True}
            count += json.loads(ask(port, "/v1/completions", body))["usage"]["completion_tokens"]
        return count

    began = time.monotonic()
    with ThreadPoolExecutor(streams) as pool:
        counts = list(pool.map(one, range(streams)))
    return sum(counts) / (time.monotonic() - began)


def processor_s(pid: int) -> float:
    """Processor seconds of the supervisor and everything below it."""
    root = psutil.Process(pid)
    times = [one.cpu_times() for one in [root, *root.children(recursive=True)]]
    return sum(one.user + one.system for one in times)


def measure(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"tokens_per_s": {}, "idle_processor_s_per_s": {}}
    port, pid = server.port, server.process.pid
    tokens_per_s(port, options.streams, 5)
    for number in range(options.rounds):
        for name in (("closed", "open"), ("open", "closed"))[number % 2]:  # other load drifts
            with open_page(port, name == "open", options.factor):
                rate = tokens_per_s(port, options.streams, options.seconds)
            found["tokens_per_s"].setdefault(name, []).append(round(rate, 1))
    for _ in range(IDLE_ROUNDS):
        for name in ("closed", "open"):
            with open_page(port, name == "open"):
                before, began = processor_s(pid), time.monotonic()
                time.sleep(IDLE_S)
                used = (processor_s(pid) - before) / (time.monotonic() - began)
            found["idle_processor_s_per_s"].setdefault(name, []).append(round(used, 5))
    return found


def summary(found: dict[str, Any], factor: float) -> dict[str, Any]:
    """The loss by one page: the median of the rounds' pairs, and the least and the largest."""
    rates, idle = found["tokens_per_s"], found["idle_processor_s_per_s"]
    pairs = zip(rates["closed"], rates["open"], strict=True)
    lost = [100 * (1 - with_pages / without) / factor for without, with_pages in pairs]
    used = statistics.median(idle["open"]) - statistics.median(idle["closed"])
    spread = statistics.stdev(rates["closed"]) / statistics.mean(rates["closed"])
    return {
        "throughput_lost_percent": round(statistics.median(lost), 3),
        "smallest_and_largest_percent": [round(min(lost), 3), round(max(lost), 3)],
        "limit_percent": LIMIT_PERCENT,
        "within_limit": statistics.median(lost) < LIMIT_PERCENT,
        "spread_of_closed_rounds_percent": round(100 * spread, 2),
        "processor_percent_of_one_core": round(100 * used, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--factor", type=float, default=25, help="questions, as pages ask")
    options = parser.parse_args()
    flags = ["--max-num-seqs", str(options.streams)]
    words = ["python", "-c", START, "serve", "nibble-demo-nvfp4", *flags]
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), words, PAGE_COST_FACTOR=str(options.factor))
        try:
            server.wait_until_ready()
            found = measure(server, options)
        finally:
            server.end()
    found["summary"] = summary(found, options.factor)
    about = {"command": " ".join(["python", *sys.argv]), "machine": machine()}
    about |= {"streams": options.streams, "factor": options.factor}
    RESULT.write_text(json.dumps({**about, **found}, indent=1) + "\n")
    print(json.dumps(found["summary"]))


if __name__ == "__main__":
    main()

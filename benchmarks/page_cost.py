"""Measures what an open status page costs a server, on this machine.

    python benchmarks/page_cost.py [--streams 16] [--rounds 4] [--seconds 10]

Starts the NVFP4 demo, then alternates rounds without and with a page that asks /nibble/live every
2 s through the gate. Two figures: generated tokens a second with all streams busy, and processor
time of the server's processes while it is idle. The second has far less noise. Writes
benchmarks/results/page_cost.json.
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
IDLE_ROUNDS, IDLE_S = 6, 10.0


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
def open_page(port: int, is_open: bool) -> Iterator[None]:
    """A page that polls while the block runs."""
    over = threading.Event()

    def poll() -> None:
        while not over.wait(POLL_S):
            ask(port, "/nibble/live")

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


def measure(server: Server, streams: int, rounds: int, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {"tokens_per_s": {}, "idle_processor_s_per_s": {}}
    port, pid = server.port, server.process.pid
    tokens_per_s(port, streams, 5)
    for number in range(rounds):
        for name in (("closed", "open"), ("open", "closed"))[number % 2]:  # other load drifts
            with open_page(port, name == "open"):
                rate = tokens_per_s(port, streams, seconds)
            found["tokens_per_s"].setdefault(name, []).append(round(rate, 1))
    for _ in range(IDLE_ROUNDS):
        for name in ("closed", "open"):
            with open_page(port, name == "open"):
                before, began = processor_s(pid), time.monotonic()
                time.sleep(IDLE_S)
                used = (processor_s(pid) - before) / (time.monotonic() - began)
            found["idle_processor_s_per_s"].setdefault(name, []).append(round(used, 5))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), ["serve", "nibble-demo-nvfp4"])
        try:
            server.wait_until_ready()
            found = measure(server, options.streams, options.rounds, options.seconds)
        finally:
            server.end()
    rates, idle = found["tokens_per_s"], found["idle_processor_s_per_s"]
    lost = 1 - statistics.median(rates["open"]) / statistics.median(rates["closed"])
    used = statistics.median(idle["open"]) - statistics.median(idle["closed"])
    found["summary"] = {
        "throughput_lost_percent": round(100 * lost, 2),
        "spread_of_closed_rounds_percent": round(
            100 * statistics.stdev(rates["closed"]) / statistics.mean(rates["closed"]), 2
        ),
        "processor_percent_of_one_core": round(100 * used, 3),
    }
    about = {"command": " ".join(sys.argv), "machine": machine()}
    RESULT.write_text(json.dumps({**about, **found}, indent=1) + "\n")
    print(json.dumps(found["summary"]))


if __name__ == "__main__":
    main()

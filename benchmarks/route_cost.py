"""What routing several models on one port adds to a request: through the router and straight to
the engine, in turns.

    python benchmarks/route_cost.py [--pairs 2000] [--repeats 5]
        [--out benchmarks/results/route_cost.json]

The engine is vLLM's app with nibble's gate and request guard, as it is served; an answer of one
word replaces the model. The router, in a separate process, has two models on one port. The client
sends the same request to the engine, through the router, and to the engine again, which shows the
noise; the order changes with every round, and differences are taken within the round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from gate_cost import INTERNAL, KEY, REQUESTS, ask_ms, build_app  # noqa: E402
from machine import machine  # noqa: E402

LIMIT_MS = 0.2
WAYS = ("direct", "routed", "direct_again")
CHATS = {name: request for name, request in REQUESTS.items() if name.startswith("chat")}
DIFFERENCES = {"route_cost": ("routed", "direct"), "control": ("direct_again", "direct")}


def run_engine(listener: socket.socket, ready: Any) -> None:
    """The engine's process."""
    import uvicorn

    app = build_app("guard")
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=60)
    config.h11_max_incomplete_event_size = 65536
    config.load()
    server = app.state.server = uvicorn.Server(config)

    async def serve() -> None:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.05)
        ready.put("engine")
        await task

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(serve())


def run_router(listener: socket.socket, engine_port: int, ready: Any) -> None:
    """The router's process, as `nibble serve A B` has it."""
    from nibble.engine.guard.limits import RequestLimits
    from nibble.engine.router.app import Router
    from nibble.engine.router.front import Front
    from nibble.engine.router.table import Entry, Table
    from nibble.engine.router.upstream import Upstream

    entries = [Entry("first", ("first",)), Entry("second", ("second",))]
    table = Table(entries, lambda: None, 60, 256)
    environ = dict(os.environ)
    router = Router(table, RequestLimits.from_environ(environ), "0.32.0")
    front = Front(listener, router, environ, list)
    front.start()
    for entry in entries:
        table.make_ready(entry, Upstream(engine_port), front.loop)
    ready.put("router")
    while True:
        time.sleep(60)


def measure(ports: dict[str, int], request: bytes, pairs: int) -> dict[str, list[float]]:
    """`pairs` rounds of one request each way; the order changes with the round."""
    connections = {
        name: socket.create_connection(("127.0.0.1", port)) for name, port in ports.items()
    }
    for connection in connections.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(200):
            ask_ms(connection, request)
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for round_number in range(pairs):
        for step in range(len(WAYS)):
            name = WAYS[(round_number + step) % len(WAYS)]
            times[name].append(ask_ms(connections[name], request))
    return times


def summary(times: dict[str, list[float]]) -> dict[str, float]:
    """Medians and 99th percentiles in ms, and differences within a round."""
    found = {f"{name}_median_ms": statistics.median(times[name]) for name in WAYS}
    found |= {f"{name}_p99_ms": statistics.quantiles(times[name], n=100)[98] for name in WAYS}
    for name, (one, other) in DIFFERENCES.items():
        within = [a - b for a, b in zip(times[one], times[other], strict=True)]
        found[f"{name}_ms"] = statistics.median(within)
        found[f"{name}_of_fastest_tenth_ms"] = _fast(times[one]) - _fast(times[other])
    return {name: round(value, 4) for name, value in found.items()}


def _fast(times: list[float]) -> float:
    """The first decile, which a busy machine disturbs less than the median."""
    return statistics.quantiles(times, n=10)[0]


def run(pairs: int, repeats: int) -> dict[str, Any]:
    """Start both processes and measure each request."""
    from nibble.engine.gate.state import GateState

    with tempfile.TemporaryDirectory() as folder:
        GateState.create(Path(folder) / "gate").set("ready", "ready")
        os.environ.update(
            NIBBLE_API_KEY=KEY,
            NIBBLE_GATE_INTERNAL=INTERNAL,
            NIBBLE_GATE_STATE=str(Path(folder) / "gate"),
        )
        engine, router = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
        engine_port, router_port = (one.getsockname()[1] for one in (engine, router))
        context = multiprocessing.get_context("fork")
        ready = context.Queue()
        children = [
            context.Process(target=run_engine, args=(engine, ready), daemon=True),
            context.Process(target=run_router, args=(router, engine_port, ready), daemon=True),
        ]
        for child in children:
            child.start()
        try:
            for _ in children:
                ready.get(timeout=600)
            ports = {"direct": engine_port, "routed": router_port, "direct_again": engine_port}
            runs = {
                name: [summary(measure(ports, request, pairs)) for _ in range(repeats)]
                for name, request in CHATS.items()
            }
        finally:
            for child in children:
                child.kill()
    return report(runs, pairs)


def report(runs: dict[str, list[dict[str, float]]], pairs: int) -> dict[str, Any]:
    """The medians over all repeats, and what they were measured with."""
    fields = [f"{name}{kind}_ms" for name in DIFFERENCES for kind in ("", "_of_fastest_tenth")]
    costs = {
        field: {
            name: round(statistics.median(one[field] for one in found), 4)
            for name, found in runs.items()
        }
        for field in fields
    }
    return {
        "what": "milliseconds that the router adds to one keep-alive request of an engine's app",
        "limit_ms": LIMIT_MS,
        **costs,
        "within_limit": max(costs["route_cost_ms"].values()) <= LIMIT_MS,
        "rounds_per_repeat": pairs,
        "repeats": runs,
        "load_average": round(os.getloadavg()[0], 2),
        "machine": machine("uvicorn", "httptools", "uvloop", "starlette", "fastapi", "msgspec"),
        "command": " ".join(["python", *sys.argv]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=2000, help="rounds per repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "route_cost.json"
    )
    options = parser.parse_args()
    result = run(options.pairs, options.repeats)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    shown = [name for name in result if name.endswith("_ms") or name == "within_limit"]
    print(json.dumps({name: result[name] for name in shown}))
    return 0 if result["within_limit"] else 1


if __name__ == "__main__":
    sys.exit(main())

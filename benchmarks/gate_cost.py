"""What gate and request guard add to a request: vLLM's app with and without them, over loopback.

    python benchmarks/gate_cost.py [--pairs 2000] [--repeats 5]
        [--out benchmarks/results/gate_cost.json]
    python benchmarks/gate_cost.py --rate URL [--key KEY]     answers/s of a running server

One process runs four uvicorn servers on one event loop, as vLLM configures them (httptools and
uvloop if installed): "plain", "gate" (without the request guard), "guard" (both, as served) and a
second "plain", which shows the noise. `guard_cost_ms` is what the request guard adds to the gate,
`gate_cost_ms` what both add.

The client sends the same request to each server on one keep-alive connection, in an order that
changes with every round. It compares within the round, so that other load on the machine affects
all servers alike. Requests: `GET /version`, and chats of 1 KB and 60 KB, which vLLM parses and
validates. An answer of one word replaces the engine's.
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
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from machine import machine  # noqa: E402

from nibble.engine.gate.asgi import Gate  # noqa: E402

KEY = "nbl-benchmark-0123456789-0123456789-0123456789"
INTERNAL = "benchmark-internal-0123456789"
SERVERS = ("plain", "gate", "guard", "plain_again")
MIDDLEWARE = {"gate": "gate_cost.GateAlone", "guard": "nibble.engine.gate.asgi.Gate"}
# Of each round; the first deciles of all times beside it, which a busy machine disturbs less.
DIFFERENCES = {
    "guard_cost": ("guard", "gate"),
    "gate_cost": ("guard", "plain"),
    "control": ("plain_again", "plain"),
}
LIMIT_MS = 0.1
RATE_TOKENS, RATE_CLIENTS, RATE_S = 64, 16, 20.0
# What the openai client sends, about: the gate looks at every header.
HEADERS = {
    "Host": "127.0.0.1",
    "Accept-Encoding": "gzip, deflate",
    "Connection": "keep-alive",
    "Accept": "application/json",
    "Content-Type": "application/json",
    "User-Agent": "OpenAI/Python 2.11.0",
    "X-Stainless-Lang": "python",
    "X-Stainless-Package-Version": "2.11.0",
    "X-Stainless-OS": "Linux",
    "X-Stainless-Arch": "x64",
    "X-Stainless-Runtime": "CPython",
    "X-Stainless-Runtime-Version": "3.11.7",
    "Authorization": f"Bearer {KEY}",
    "X-Stainless-Async": "false",
    "x-stainless-retry-count": "0",
    "x-stainless-read-timeout": "600",
}


def request_bytes(method: str, path: str, body: bytes = b"") -> bytes:
    length = {"Content-Length": str(len(body))} if body else {}
    lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in {**HEADERS, **length}.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chat(messages: int, characters: int) -> bytes:
    text = ('An answer\'s cost hangs on "quotes" too.\n' * (characters // 40 + 1))[:characters]
    turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n in range(messages)]
    return json.dumps(
        {"model": "default", "messages": turns, "max_tokens": 64, "temperature": 0.7}
    ).encode()


REQUESTS = {
    "GET /version": request_bytes("GET", "/version"),
    "chat of 1 KB": request_bytes("POST", "/v1/chat/completions", chat(3, 250)),
    "chat of 60 KB": request_bytes("POST", "/v1/chat/completions", chat(31, 1800)),
}


class OneWord:
    """Replaces the engine: the same answer for each chat."""

    async def create_chat_completion(self, request: Any, raw_request: Any) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

        message = {"role": "assistant", "content": "word"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return ChatCompletionResponse(
            model=request.model, choices=[{"index": 0, "message": message}], usage=usage
        )


class GateAlone(Gate):
    """The gate without the request guard."""

    async def _guarded(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)

    async def _lifespan(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


def build_app(server: str) -> Any:
    from vllm.entrypoints.launchers.app import build_app as build_vllm_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    flags = ["--middleware", MIDDLEWARE[server]] if server in MIDDLEWARE else []
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
    assert args
    app = build_vllm_app(args, ("generate",))
    app.state.log_stats = (
        False  # what init_app_state sets where there is an engine; the lifespan asks for it
    )
    app.state.openai_serving_chat = OneWord()
    return app


def run_servers(sockets: list[socket.socket], ready: Any) -> None:
    """The server process: one uvicorn server for each socket, in the order of SERVERS, on one event
    loop.
    """
    import uvicorn

    configs, servers = [], []
    for name in SERVERS:
        app = build_app(name)
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=60)
        config.h11_max_incomplete_event_size = 65536
        config.load()
        configs.append(config)
        servers.append(uvicorn.Server(config))
        app.state.server = servers[-1]  # as vLLM does, launchers/launcher.py:232

    async def serve_all() -> None:
        tasks = [
            asyncio.create_task(server.serve(sockets=[sock]))
            for server, sock in zip(servers, sockets, strict=True)
        ]
        while not all(server.started for server in servers):
            await asyncio.sleep(0.05)
        protocol = configs[0].http_protocol_class
        ready.put(f"{protocol.__name__} on {type(asyncio.get_running_loop()).__module__}")
        await asyncio.gather(*tasks)

    with asyncio.Runner(loop_factory=configs[0].get_loop_factory()) as runner:
        runner.run(serve_all())


def ask_ms(connection: socket.socket, request: bytes) -> float:
    """Send the request and read the whole answer; milliseconds. RuntimeError for a status other
    than 200.
    """
    begin = time.perf_counter_ns()
    connection.sendall(request)
    answer = connection.recv(65536)
    while b"\r\n\r\n" not in answer or not answer.rstrip().endswith(b"}"):
        answer += connection.recv(65536)
    took = (time.perf_counter_ns() - begin) / 1e6
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"unexpected answer: {answer[:200]!r}")
    return took


def measure(ports: list[int], request: bytes, pairs: int) -> dict[str, list[float]]:
    """`pairs` rounds of one request to each server; the order changes with the round."""
    connections = [socket.create_connection(("127.0.0.1", port)) for port in ports]
    times: dict[str, list[float]] = {name: [0.0] * pairs for name in SERVERS}
    for connection in connections:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(200):
            ask_ms(connection, request)
    for round_number in range(pairs):
        for step in range(len(SERVERS)):
            index = (round_number + step) % len(SERVERS)
            times[SERVERS[index]][round_number] = ask_ms(connections[index], request)
    return times


def summary(times: dict[str, list[float]]) -> dict[str, float]:
    """Medians in ms of each server, and of the differences within a round."""
    fast = {name: statistics.quantiles(times[name], n=10)[0] for name in SERVERS}
    found = {f"{name}_median_ms": statistics.median(times[name]) for name in SERVERS}
    for name, (one, other) in DIFFERENCES.items():
        within = [a - b for a, b in zip(times[one], times[other], strict=True)]
        found |= {
            f"{name}_ms": statistics.median(within),
            f"{name}_of_fastest_tenth_ms": fast[one] - fast[other],
        }
    return {name: round(value, 4) for name, value in found.items()}


def report(runs: dict[str, list[dict[str, float]]], pairs: int, server: str) -> dict[str, Any]:
    def median(name: str, field: str) -> float:
        return round(statistics.median(run[field] for run in runs[name]), 4)

    fields = [f"{name}{kind}_ms" for name in DIFFERENCES for kind in ("", "_of_fastest_tenth")]
    costs = {field: {name: median(name, field) for name in runs} for field in fields}
    return {
        "what": (
            "milliseconds that nibble's request guard and gate add to one keep-alive request of"
            " vLLM's app (no engine)"
        ),
        "limit_ms": LIMIT_MS,
        **costs,
        "plain_ms": {name: median(name, "plain_median_ms") for name in runs},
        "within_limit": costs["guard_cost_ms"]["chat of 1 KB"] <= LIMIT_MS,
        "rounds_per_repeat": pairs,
        "repeats": runs,
        "server": server,
        "machine": machine("uvicorn", "httptools", "uvloop", "starlette", "fastapi", "msgspec"),
        "command": " ".join(["python", *sys.argv]),
    }


def answers_per_second(url: str, key: str) -> float:
    """Answers/s of RATE_CLIENTS clients together, with RATE_TOKENS tokens per answer; each asks
    again at once.
    """
    body = {"model": "default", "prompt": "word1", "max_tokens": RATE_TOKENS, "ignore_eos": True}
    deadline = time.monotonic() + RATE_S

    def ask_again(_: int) -> int:
        count = 0
        while time.monotonic() < deadline:
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            asked = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(body).encode(), headers
            )
            with urllib.request.urlopen(asked, timeout=120) as answer:
                answer.read()
            count += 1
        return count

    began = time.monotonic()
    with ThreadPoolExecutor(RATE_CLIENTS) as pool:
        answered = sum(pool.map(ask_again, range(RATE_CLIENTS)))
    return answered / (time.monotonic() - began)


def add_rate(path: Path, url: str, key: str) -> float:
    """Add to the result at `path` the share of each second that the guard takes at the rate of the
    server at `url`.
    """
    result = json.loads(path.read_text())
    rate = answers_per_second(url, key)
    share = result["guard_cost_ms"]["chat of 1 KB"] / 1000 * rate
    result["throughput"] = {
        "answers_per_second": round(rate, 2),
        "tokens_per_answer": RATE_TOKENS,
        "clients": RATE_CLIENTS,
        "share_of_time": round(share, 6),
        "within_limit": share < 0.01,
        "load_average": round(os.getloadavg()[0], 2),
    }
    path.write_text(json.dumps(result, indent=2) + "\n")
    return share


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=2000, help="rounds per repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "gate_cost.json"
    )
    parser.add_argument(
        "--rate", metavar="URL", help="measure the answers/s of this server instead"
    )
    parser.add_argument("--key", default="", help="the key of that server")
    options = parser.parse_args()
    if options.rate:
        print(f"{add_rate(options.out, options.rate, options.key):.4%} of the time")
        return 0
    result = run(options.pairs, options.repeats)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(
        json.dumps(
            {
                key: result[key]
                for key in ("guard_cost_ms", "gate_cost_ms", "control_ms", "within_limit", "server")
            }
        )
    )
    return 0 if result["within_limit"] else 1


def run(pairs: int, repeats: int) -> dict[str, Any]:
    from nibble.engine.gate.state import GateState

    with tempfile.TemporaryDirectory() as folder:
        GateState.create(Path(folder) / "gate").set("ready", "ready")
        os.environ.update(
            NIBBLE_API_KEY=KEY,
            NIBBLE_GATE_INTERNAL=INTERNAL,
            NIBBLE_GATE_STATE=str(Path(folder) / "gate"),
        )
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in SERVERS]
        context = multiprocessing.get_context("fork")
        ready = context.Queue()
        child = context.Process(target=run_servers, args=(sockets, ready), daemon=True)
        child.start()
        try:
            server = ready.get(timeout=600)
            ports = [sock.getsockname()[1] for sock in sockets]
            runs = {
                name: [summary(measure(ports, request, pairs)) for _ in range(repeats)]
                for name, request in REQUESTS.items()
            }
        finally:
            child.kill()
    return report(runs, pairs, server)


if __name__ == "__main__":
    sys.exit(main())

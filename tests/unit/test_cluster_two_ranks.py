"""Two `nibble serve` on two loopback addresses, one cluster without Ray; only vLLM and the
preflight are stand-ins.

A real vLLM: tests/e2e/test_lost_ranks.py.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.servers.serving import clean_environ, free_port

HEARD_S = 5.0
DRAIN_S = 10
RANK_1 = r"127\.0\.0\.2 \(rank 1\)"
# As vLLM 0.32 behaves: an API whose requests hang once a worker on the other machine is gone, and a
# headless rank.
API = """
import http.server, json, sys, threading, time
class Api(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.reply()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body.get("max_tokens") == 900: time.sleep(300)
        self.reply()
    def reply(self):
        models = {"data": [{"id": "nibble-demo"}, {"id": "default"}]}
        text = json.dumps(models) if self.path == "/v1/models" else "{}"
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
    def log_message(self, *args): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Api)
print("(APIServer pid=1) INFO 11-21 06:00:00 [entry.py:136] Supported tasks: ['generate']", flush=True)
print("INFO:     Application startup complete.", flush=True)
server.serve_forever()
"""  # noqa: E501
HEADLESS = """
import subprocess, time
worker = subprocess.Popen(["VLLM::Worker_TP1", "300"], executable="/bin/sleep")
code = worker.wait()
print(f"ERROR 11-23 07:47:37 [multiproc_executor.py:315] Worker proc VllmWorker-1 died unexpectedly (exit code: {code}), "
      "shutting down executor.", flush=True)
time.sleep(2)
"""  # noqa: E501
NIBBLE = """
import sys
from nibble.engine import process as engine
from nibble.cluster import agent, coordinator
from nibble.cluster.preflight import Report
program, port, agent_port, *words = sys.argv[1:]
agent.AGENT_PORT = int(agent_port)
engine.child_command = lambda argv: [sys.executable, "-c", program, port]
coordinator.Cluster._preflight = lambda self, nodes: Report(nodes, [], None)
sys.argv[1:] = words
from nibble.cli.app import main
main()
"""
WORDS = (
    "serve",
    "nibble-demo",
    "--max-model-len",
    "1024",
    "--canary",
    "off",
    "--kernel-assertion",
    "warn",
)


class Rank:
    def __init__(self, folder: Path, number: int, program: str, agent_port: int) -> None:
        folder.mkdir()
        self.port, self.control_port, self.err = free_port(), free_port(), folder / "stderr"
        own = {
            "NIBBLE_NNODES": "2",
            "NIBBLE_NODE_RANK": str(number),
            "HEAD_IP": "127.0.0.1",
            "WORKER_IP": f"127.0.0.{number + 1}",
            "TENSOR_PARALLEL_SIZE": "2",
            "NIBBLE_CLUSTER_TOKEN": "0123456789abcdef",
            "NIBBLE_MEMORY_RESERVE_GIB": "0",
            "NIBBLE_KV_CACHE_BYTES": str(64 << 20),
            "NIBBLE_DRAIN_SECONDS": str(DRAIN_S),
            "PORT": str(self.port),
            "NIBBLE_CONTROL_PORT": str(self.control_port),
        }
        words = [sys.executable, "-c", NIBBLE, program, str(self.port), str(agent_port), *WORDS]
        with self.err.open("wb") as err:
            environ = clean_environ(folder, **own)
            self.process = subprocess.Popen(words, env=environ, cwd=folder, stdout=err, stderr=err)

    def said(self) -> str:
        return self.err.read_text(errors="replace")

    def ask(self, port: int, path: str, body: Mapping[str, int] | None = None) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        with contextlib.closing(connection):
            connection.request(
                "GET" if body is None else "POST", path, json.dumps(body) if body else None
            )
            return connection.getresponse().status

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            return self.ask(self.control_port, "/ready") == 200
        return False

    def wait_for(self, what: Callable[[], object], seconds: float = 60.0) -> float:
        began = time.monotonic()
        while not what():
            assert time.monotonic() - began < seconds, self.said()[-4000:]
            time.sleep(0.02)
        return time.monotonic() - began

    def exit_code(self, seconds: float) -> int:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        raise AssertionError(f"runs after {seconds:.1f} s: {self.said()[-3000:]}")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rank, Rank]]:
    folder, agent_port = tmp_path_factory.mktemp("ranks"), free_port()
    head = Rank(folder / "0", 0, API, agent_port)
    rank1 = Rank(folder / "1", 1, HEADLESS, agent_port)
    try:
        for one in (head, rank1):
            one.wait_for(one.is_ready, 120)
        yield head, rank1
    finally:
        head.end()
        rank1.end()


def kill_worker(rank1: Rank) -> None:
    """Once it is watched: a process counts from the second look on, a second after the first."""
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", rank1.control_port, timeout=5)
    ) as asked:
        asked.request("GET", "/status")
        engine = json.loads(asked.getresponse().read())["engine_pid"]
    children = Path(f"/proc/{engine}/task/{engine}/children")
    rank1.wait_for(lambda: children.read_text().split())
    time.sleep(3)
    os.kill(int(children.read_text().split()[0]), signal.SIGKILL)


def test_a_killed_worker_on_the_other_machine_ends_requests_within_5_s_and_the_control_port_answers_all_along(  # noqa: E501
    ranks: tuple[Rank, Rank],
) -> None:
    head, rank1 = ranks
    ended: list[float] = []
    over, refused, asked = threading.Event(), [], []

    def hang() -> None:
        try:
            head.ask(head.port, "/v1/completions", {"max_tokens": 900})
        except (OSError, http.client.HTTPException):
            ended.append(time.monotonic())

    def poll() -> None:
        while not over.wait(0.02):
            try:
                asked.append(head.ask(head.control_port, "/status"))
            except OSError as error:
                refused.append(error)

    requests = [threading.Thread(target=hang, daemon=True) for _ in range(2)]
    threading.Thread(target=poll, daemon=True).start()
    requests[0].start()
    kill_worker(rank1)
    killed = time.monotonic()
    requests[1].start()  # between the end of the worker and what the head makes of it
    head.wait_for(lambda: "the server is down" in head.said(), 30)
    for one in requests:
        one.join(30)
    assert len(ended) == 2 and max(ended) - killed < HEARD_S
    named = (
        rf"node {RANK_1}: VLLM::Worker_TP1 \(pid \d+\) was killed by SIGKILL: the server is down"
    )
    assert re.search(named, head.said()), head.said()
    head.wait_for(head.is_ready, 60)
    over.set()
    assert len(asked) > 20
    assert refused == []


def test_rank_0_that_is_stopped_while_it_waits_ends_both_with_0_within_the_drain_time(
    ranks: tuple[Rank, Rank],
) -> None:
    head, rank1 = ranks
    rank1.wait_for(lambda: "run 2 of the head" in rank1.said() and rank1.is_ready())
    before = head.said().count("the server is down")
    kill_worker(rank1)
    head.wait_for(lambda: head.said().count("the server is down") > before, 30)
    head.process.send_signal(signal.SIGTERM)
    stopped = time.monotonic()
    assert head.exit_code(DRAIN_S) == 0, head.said()[-3000:]
    assert rank1.exit_code(DRAIN_S - (time.monotonic() - stopped)) == 0, rank1.said()[-3000:]

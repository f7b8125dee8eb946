"""A Ray cluster on two hosts of namespaces: what a check misses, a killed worker process, and a
head that is told to stop.

One cluster for all tests here, in the order of its life.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nibble.machine.process_table import processes
from tests.support.cluster.two_hosts import Host, Process, two_hosts

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
pytest.importorskip("ray")
RAY = {"NUM_GPUS": "1", "RAY_OVERRIDE_RESOURCES": '{"CPU": 2}'}
CHECK = ("nibble", "cluster", "check")
SERVE = ("serve", "nibble-demo-nvfp4", "--max-model-len", "1024", "--enforce-eager")
START_S = 400.0  # 60 s on two free cores; tests may share them
# Asks /status of the server 20 times a second until a file is there.
POLL = """
import json, pathlib, sys, time, urllib.request
asked, refused = 0, 0
while not pathlib.Path(sys.argv[1]).exists():
    asked += 1
    try:
        urllib.request.urlopen("http://127.0.0.1:8001/status", timeout=5).read()
    except OSError:
        refused += 1
    time.sleep(0.05)
print(json.dumps([asked, refused]))
"""
STREAM = """
import json, sys, urllib.request
body = {"model": "default", "prompt": "word7", "max_tokens": int(sys.argv[1]), "ignore_eos": True, "stream": True}
request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(),
    {"content-type": "application/json"})
for line in urllib.request.urlopen(request, timeout=300):
    print(line.decode(), end="", flush=True)
"""  # noqa: E501


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    try:
        made = two_hosts()
        found = made.__enter__()
    except OSError as error:
        pytest.skip(str(error))
    yield found
    made.__exit__(None, None, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def head(hosts: tuple[Host, Host], folder: Path) -> Iterator[Process]:
    found = hosts[0].start(folder / "head", "ray-head", **RAY)
    found.wait_said("Ray head is up", 180)
    yield found
    found.end()


@pytest.fixture(scope="module")
def worker(hosts: tuple[Host, Host], head: Process, folder: Path) -> Iterator[Process]:
    found = hosts[1].start(folder / "worker", "ray-worker", **RAY)
    found.wait_said("has joined", 180)
    yield found
    found.end()


@pytest.fixture(scope="module")
def serve(hosts: tuple[Host, Host], worker: Process, folder: Path) -> Iterator[Process]:
    more = {"NIBBLE_CLUSTER": "ray", "TENSOR_PARALLEL_SIZE": "2", "NIBBLE_CANARY": "warn"}
    found = hosts[0].start(folder / "serve", *SERVE, **more, NIBBLE_CLUSTER_WAIT_SECONDS="300")
    found.wait_said("] ready in", START_S)
    yield found
    found.end()


def part_of(node: Process) -> int:
    """The pid of the worker process of vLLM's on a Ray node."""
    table = {one.pid: one for one in processes()}

    def is_below(pid: int) -> bool:
        while pid in table and pid != node.process.pid:
            pid = table[pid].parent
        return pid == node.process.pid

    (pid,) = [
        one.pid
        for one in table.values()
        if one.name.startswith("ray::RayWorkerP") and is_below(one.pid)
    ]
    return pid


def test_a_check_of_a_head_alone_names_what_is_missing_and_no_network(
    hosts: tuple[Host, Host], head: Process, folder: Path
) -> None:
    for words in ((), ("--nnodes", "2"), (SERVE[1], "--tensor-parallel-size", "2")):
        checked = hosts[0].start(folder / "alone", *CHECK, *words, NIBBLE_CLUSTER_WAIT_SECONDS="2")
        assert checked.wait(60) == 9
        assert "waiting for the cluster" in checked.said()
        assert not re.search("all-reduce|firewall|NCCL", checked.said())
    one = hosts[0].start(folder / "one", *CHECK, "--nnodes", "1")
    assert one.wait(120) == 0, one.said()


def test_a_check_waits_for_the_worker(
    hosts: tuple[Host, Host], head: Process, folder: Path
) -> None:
    checked = hosts[0].start(
        folder / "both", *CHECK, "--nnodes", "2", NIBBLE_CLUSTER_WAIT_SECONDS="200"
    )
    checked.wait_said("the plan needs 2 nodes", 60)
    worker = hosts[1].start(folder / "first", "ray-worker", **RAY)
    try:
        assert checked.wait(200) == 0, checked.said()
        assert "all-reduce over 2 nodes" in checked.said()
    finally:
        worker.end()


def test_a_killed_worker_process_is_named_with_node_and_rank_and_the_service_comes_back(
    hosts: tuple[Host, Host], worker: Process, serve: Process, folder: Path
) -> None:
    over = folder / "over"
    poll = hosts[0].start(folder / "poll", "python", "-c", POLL, str(over))
    stream = hosts[0].start(folder / "stream", "python", "-c", STREAM, "900")
    stream.wait_said("data:")
    before = serve.said().count("] ready in")
    pid = part_of(worker)
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    serve.wait_said("the server is down", 20)
    assert time.monotonic() - killed < 8  # 5 s and what it took to write
    assert stream.wait(10) != 0 or '"error"' in stream.said() or "[DONE]" not in stream.said()
    named = rf"node 10\.89\.8\.2: rank \d of the model \(pid {pid}\) ended by itself"
    assert re.search(named, serve.said()), serve.said()[-3000:]
    deadline = time.monotonic() + START_S
    while serve.said().count("] ready in") == before:
        assert serve.process.poll() is None and time.monotonic() < deadline, serve.said()[-4000:]
        time.sleep(0.5)
    over.touch()
    assert poll.wait(30) == 0
    asked, refused = json.loads(poll.said().splitlines()[-1])
    assert asked > 20 and refused == 0


def test_a_head_that_is_stopped_lets_the_stream_end_first(
    hosts: tuple[Host, Host], head: Process, serve: Process, folder: Path
) -> None:
    stream = hosts[0].start(folder / "last", "python", "-c", STREAM, "60")
    stream.wait_said("data:")
    head.process.terminate()
    assert stream.wait(60) == 0
    assert "[DONE]" in stream.said()
    assert head.wait(60) == 0
    assert "drains first" in head.said()
    serve.wait_said("drained and stopped", 10)
    serve.wait_said("stopped: the server is down until the cluster is complete again", 20)
    assert serve.process.poll() is None
    serve.process.terminate()
    assert serve.wait(30) == 0

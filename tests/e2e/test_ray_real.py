"""A real Ray head through the entry point: token, ports, and how it ends. (Several nodes:
tests/cluster.)
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nibble.cluster import ray_reach
from nibble.cluster.ray_reach import unreached
from nibble.cluster.token import TOKEN_FILE
from nibble.machine.process_table import processes
from nibble.plan.cluster_ports import AGENT_PORT, GCS_PORT, NODE_PORTS, PORT_VARIABLES
from tests.support.paths import ROOT
from tests.support.servers.serving import clean_environ

pytest.importorskip("ray")
NAMES = {"gcs_server", "raylet"}
WORKERS = range(NODE_PORTS["--min-worker-port"], NODE_PORTS["--max-worker-port"] + 1)


class Node:
    def __init__(self, folder: Path, mode: str, **environ: str) -> None:
        self.folder = folder
        self.environ = clean_environ(folder, NUM_GPUS="0", **environ)
        self.err = folder / f"{mode}.err"
        with self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [ROOT / "entrypoint.sh", mode], env=self.environ, stderr=err, stdout=err
            )

    def wait_until_up(self) -> Node:
        deadline = time.monotonic() + 90
        while "is up at" not in self.err.read_text():
            assert self.process.poll() is None, self.err.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        return self

    def address(self) -> str:
        found = re.search(r"is up at ([\d.]+):", self.err.read_text())
        assert found
        return found[1]


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Node]:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", GCS_PORT)) == 0:
            pytest.fail(f"something listens on {GCS_PORT} already")
    node = Node(tmp_path, "ray-head")
    yield node.wait_until_up()
    node.process.terminate()
    node.process.wait(30)


def ray_processes() -> list[str]:
    return [one.name for one in processes() if one.name in NAMES]


def open_ports(of_session_of: str) -> set[int]:
    """TCP ports on which processes of the session of that program listen beyond loopback."""
    session = next(one.session for one in processes() if one.name == of_session_of)
    inodes: dict[str, int] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].rsplit(":", 1)
            if fields[3] == "0A" and address not in (
                "0100007F",
                "0000000000000000FFFF00000100007F",
            ):
                inodes[f"socket:[{fields[9]}]"] = int(port, 16)
    found: set[int] = set()
    for one in processes():
        if one.session == session:
            for link in Path(f"/proc/{one.pid}/fd").iterdir():
                try:
                    found |= {inodes[target]} if (target := os.readlink(link)) in inodes else set()
                except FileNotFoundError:
                    continue
    return found


def run(command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_head_opens_named_ports_only_lets_nobody_in_without_its_token_and_stops_with_0(
    head: Node,
) -> None:
    file = Path(head.environ["NIBBLE_CACHE_DIR"]) / TOKEN_FILE
    token = file.read_text().strip()
    said = head.err.read_text()
    assert str(file) in said
    assert token not in said
    named = {GCS_PORT, AGENT_PORT, *NODE_PORTS.values(), *PORT_VARIABLES.values()}
    assert {port for port in open_ports("raylet") if port not in WORKERS} <= named

    join = (
        "import ray, sys; ray.init(address=sys.argv[1]); print(ray.get(ray.remote(lambda: 6 *"
        " 7).remote()))"
    )
    command = [sys.executable, "-c", join, f"{head.address()}:{GCS_PORT}"]
    allowed = {**head.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    done = run(command, allowed)
    assert done.stdout.strip().endswith("42"), done.stderr[-2000:]

    strangers = [
        {"RAY_AUTH_MODE": "disabled"},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
    ]
    with ThreadPoolExecutor() as pool:  # each tries for 20 s
        for done in pool.map(lambda key: run(command, {**head.environ, **key}), strangers):
            assert done.returncode != 0
            assert "InvalidAuthToken" in done.stderr, done.stderr[-2000:]

    worker = Node(head.folder, "ray-worker", HEAD_IP=head.address(), RAY_AUTH_TOKEN="0" * 64)
    assert worker.process.wait(90) == 9
    lines = worker.err.read_text().splitlines()
    assert len(lines) == 1
    assert "refused this node's token" in lines[0]

    head.process.terminate()
    assert head.process.wait(30) == 0
    assert ray_processes() == []


@pytest.mark.slow
def test_a_node_that_rays_head_does_not_reach_is_told_before_a_start(
    head: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, over = head.address(), threading.Event()
    token = (Path(head.environ["NIBBLE_CACHE_DIR"]) / TOKEN_FILE).read_text().strip()
    key = {
        "RAY_ADDRESS": f"{address}:{GCS_PORT}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
    }
    environ = {**head.environ, **key}
    assert unreached([address], environ, over) is None
    monkeypatch.setattr(ray_reach, "REACH_S", 2.0)
    why = unreached([address, "10.9.9.9"], environ, over)
    assert why == f"Ray's head does not reach all of {address}, 10.9.9.9 within 2 s"
    over.set()
    assert unreached([address], environ, over) is None


@pytest.mark.slow  # tests/unit/test_ray_node.py has stand-ins for Ray
def test_a_head_ends_with_10_when_ray_dies(head: Node) -> None:
    gcs = next(one for one in processes() if one.name == "gcs_server")
    os.kill(gcs.pid, signal.SIGKILL)
    assert head.process.wait(30) == 10
    assert "Ray ended by itself" in head.err.read_text()
    assert ray_processes() == []

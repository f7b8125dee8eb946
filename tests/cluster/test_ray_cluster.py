"""A Ray head, a worker, and a stranger on the same network; the server runs on the head's machine."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_nodes import DEMO, START_S, TOKEN, Node, Stream, greedy, node
from containers import client

# Slow: minutes of containers that have not yet run from end to end on a machine of their own.
pytestmark = [pytest.mark.docker, pytest.mark.slow]

HEAD = "10.89.7.21"
NAMED_S = 30.0
ENDED = re.compile("no answer from the head|the head at .* was started anew|Ray ended by itself")
RAY = {"HEAD_IP": HEAD, "NUM_GPUS": "1"}  # a "GPU" is a name here, see cluster_platform
JOIN = """
import ray, sys
ray.init(address=sys.argv[1], _node_ip_address=sys.argv[2])
"""
SUBMIT = """
import sys
from ray.job_submission import JobSubmissionClient
JobSubmissionClient("http://" + sys.argv[1]).submit_job(entrypoint="true")
"""
# What vLLM would copy to its Ray workers (vllm 0.32 v1/executor/ray_env_utils.py).
COPIED = "from vllm.v1.executor.ray_env_utils import get_driver_env_vars; print(*get_driver_env_vars(set()))"


@pytest.fixture(scope="module")
def head(cpu_image: str, net: str) -> Iterator[Node]:
    with node(cpu_image, net, 21, "ray-head", **RAY) as found:
        found.wait_for(lambda: "Ray head is up" in found.logs(), 90, "up")
        yield found


@pytest.fixture(scope="module")
def worker(head: Node, cpu_image: str, net: str) -> Iterator[Node]:
    with node(cpu_image, net, 22, "ray-worker", options=["--restart", "on-failure"], **RAY) as found:
        found.wait_for(lambda: "has joined" in found.logs(), 90, "joined")
        yield found


@pytest.fixture(scope="module")
def stranger(cpu_image: str, net: str) -> Iterator[Node]:
    with node(cpu_image, net, 23, "sleep", "3600", NIBBLE_CLUSTER_TOKEN="") as found:
        yield found


class Serve:
    """`nibble serve` in the head's container."""

    def __init__(self, head: Node, log: Path, **environ: str) -> None:
        self.head, self.log = head, log
        values = {"NIBBLE_CLUSTER": "ray", "NUM_GPUS": "", "NIBBLE_API_KEY": "", **environ}
        options = [word for name, value in values.items() for word in ("--env", f"{name}={value}")]
        words = [
            client() or "docker",
            "exec",
            *options,
            head.container.id,
            "/opt/nibble/entrypoint.sh",
            "serve",
        ]
        with log.open("wb") as out:
            self.process = subprocess.Popen([*words, DEMO, "--max-model-len", "1024"], stdout=out, stderr=out)

    def wait_ready(self, seconds: float = START_S) -> None:
        def look() -> bool:
            assert self.process.poll() is None, self.log.read_text()[-6000:]
            return self.head.is_ready()

        self.head.wait_for(look, seconds, "ready")


@pytest.fixture(scope="module")
def serve(head: Node, worker: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    found = Serve(head, tmp_path_factory.mktemp("serve") / "log", TENSOR_PARALLEL_SIZE="2")
    try:
        found.wait_ready()
        yield found
    finally:
        found.process.kill()


def test_a_worker_with_a_wrong_token_says_so_in_one_line(head: Node, cpu_image: str, net: str) -> None:
    with node(cpu_image, net, 24, "ray-worker", **RAY, NIBBLE_CLUSTER_TOKEN="0" * 64) as found:
        assert found.container.exit_code() == 9
        assert "refused this node's token" in found.logs()
        assert len(found.logs().splitlines()) == 1


def test_a_worker_without_a_token_says_where_to_get_it(head: Node, cpu_image: str, net: str) -> None:
    with node(cpu_image, net, 24, "ray-worker", **RAY, NIBBLE_CLUSTER_TOKEN="") as found:
        assert found.container.exit_code() == 2
        assert "copy the file that the head printed" in found.logs()


def test_a_stranger_gets_in_nowhere(head: Node, stranger: Node) -> None:
    """No ray.init, no Ray client, no job, no agent: the token is needed, and two of the ports are closed."""
    bare = stranger.python(JOIN, f"{HEAD}:6379", stranger.address, RAY_AUTH_MODE="disabled")
    assert bare.returncode != 0
    wrong = stranger.python(
        JOIN, f"{HEAD}:6379", stranger.address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64
    )
    assert wrong.returncode != 0
    for port in (10001, 8265):
        connect = f"import socket; socket.create_connection(('{HEAD}', {port}), 5)"
        assert "ConnectionRefusedError" in stranger.python(connect).stderr
    assert stranger.python(SUBMIT, f"{HEAD}:8265").returncode != 0
    agent = "import sys, urllib.request as u; u.urlopen(u.Request(sys.argv[1], b'{}'))"
    assert "401" in stranger.python(agent, f"http://{HEAD}:6388/nodes").stderr
    assert TOKEN not in head.logs()


def test_answers_over_ray_are_those_of_one_machine(
    serve: Serve, head: Node, one_machines_answers: list[str]
) -> None:
    assert greedy(head) == one_machines_answers


def test_secrets_are_not_copied_to_rays_workers(serve: Serve, head: Node) -> None:
    names = (
        "NIBBLE_API_KEY",
        "HF_TOKEN",
        "NIBBLE_CLUSTER_TOKEN",
        "NIBBLE_GATE_INTERNAL",
        "RAY_AUTH_TOKEN_PATH",
    )
    copied = head.python(COPIED, **dict.fromkeys(names, "secret"), HARMLESS="1").stdout.split()
    assert "HARMLESS" in copied
    assert not set(names) & set(copied)


def test_status_shows_who_holds_what(serve: Serve, head: Node, worker: Node) -> None:
    ask = "from nibble.cli import main; import sys; sys.argv[1:] = ['cluster', 'status']; main()"
    lines = head.python(ask).stdout.splitlines()
    assert [line.split()[:3] for line in lines[:2]] == [
        [HEAD, "ray-head", "1"],
        [worker.address, "ray-worker", "1"],
    ]
    assert all("1 of vLLM's processes" in line for line in lines[:2])


def test_a_node_that_is_cut_off_is_named_and_the_service_comes_back_with_it(
    serve: Serve, head: Node, worker: Node
) -> None:
    stream = Stream(head, 900)
    assert stream.first_chunk()
    worker.cut()
    head.wait_for(lambda: not head.is_ready(), NAMED_S, "not ready")
    assert stream.ended_in_error(NAMED_S)
    head.wait_for(lambda: f"node {worker.address}" in serve.log.read_text(), NAMED_S, "naming the node")
    worker.wait_for(lambda: worker.leftovers() == [], 60, "without leftovers")
    worker.join()
    serve.wait_ready()


def test_with_the_head_everything_ends(serve: Serve, head: Node, worker: Node) -> None:
    assert worker.leftovers()
    before = len(ENDED.findall(worker.logs()))
    head.docker("kill")
    serve.process.wait(10)
    worker.wait_for(lambda: len(ENDED.findall(worker.logs())) > before, NAMED_S, "seeing it")
    worker.wait_for(lambda: worker.leftovers() == [], NAMED_S, "without leftovers")

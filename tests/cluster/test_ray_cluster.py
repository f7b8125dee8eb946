"""A Ray head with the server, two workers and a client; one set of containers, in the order of
their life.

The model lies on the head only, and two of the three nodes hold it: the second worker is there for
when the first is lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.cluster.cluster_nodes import (
    DEMO,
    NAMED_S,
    TOKEN,
    Node,
    Serve,
    Stream,
    greedy,
    node,
)

pytestmark = [pytest.mark.docker, pytest.mark.slow]

HEAD = "10.89.7.21"
ENDED = re.compile("no answer from the head|the head at .* restarted|Ray ended by itself")
RAY = {"HEAD_IP": HEAD, "NUM_GPUS": "1"}  # a "GPU" is a name here, see cluster_platform
MODEL = "/var/cache/nibble/demo"
COPY = f"import shutil; shutil.copytree('{DEMO}', '{MODEL}')"
STATUS = "from nibble.cli.app import main; import sys; sys.argv[1:] = ['cluster', 'status']; main()"
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
COPIED = (
    "from vllm.v1.executor.ray_env_utils import get_driver_env_vars;"
    " print(*get_driver_env_vars(set()))"
)


@pytest.fixture(scope="module")
def head(cpu_image: str, net: str) -> Iterator[Node]:
    with node(cpu_image, net, 21, "ray-head", **RAY) as found:
        found.wait_for(lambda: "Ray head is up" in found.logs(), 90, "up")
        yield found


def ray_worker(cpu_image: str, net: str, number: int) -> Iterator[Node]:
    with node(
        cpu_image, net, number, "ray-worker", options=["--restart", "on-failure"], **RAY
    ) as found:
        found.wait_for(lambda: "has joined" in found.logs(), 90, "joined")
        yield found


@pytest.fixture(scope="module")
def serve(head: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Started before there is a worker."""
    assert head.python(COPY).returncode == 0
    more = {"TENSOR_PARALLEL_SIZE": "2", "NIBBLE_CLUSTER_MODEL": "head"}
    found = Serve(head, tmp_path_factory.mktemp("serve") / "log", MODEL, **more)
    try:
        found.wait_for(lambda: found.said("2 GPUs are needed"), 90, "waiting for GPUs")
        yield found
    finally:
        found.process.kill()


@pytest.fixture(scope="module")
def worker(serve: Serve, cpu_image: str, net: str) -> Iterator[Node]:
    """Joins late, and then holds half of the model."""
    for found in ray_worker(cpu_image, net, 22):
        serve.wait_ready()
        yield found


@pytest.fixture(scope="module")
def spare(worker: Node, cpu_image: str, net: str) -> Iterator[Node]:
    """Joins while the cluster serves."""
    yield from ray_worker(cpu_image, net, 23)


def test_a_worker_with_a_wrong_token_says_so_in_one_line(
    head: Node, cpu_image: str, net: str
) -> None:
    with node(cpu_image, net, 24, "ray-worker", **RAY, NIBBLE_CLUSTER_TOKEN="0" * 64) as found:
        assert found.container.exit_code() == 9
        assert "refused this node's token" in found.logs()
        assert len(found.logs().splitlines()) == 1


def test_a_worker_without_a_token_says_where_to_get_it(
    head: Node, cpu_image: str, net: str
) -> None:
    with node(cpu_image, net, 24, "ray-worker", **RAY, NIBBLE_CLUSTER_TOKEN="") as found:
        assert found.container.exit_code() == 2
        assert "copy the file that the head printed" in found.logs()


def test_a_second_head_is_turned_away(head: Node, cpu_image: str, net: str) -> None:
    with node(cpu_image, net, 24, "ray-head", **RAY) as found:
        assert found.container.exit_code() == 9
        assert f"{HEAD} is not an address of this machine" in found.logs()
    words = ["/opt/nibble/entrypoint.sh", "ray-head"]
    beside = head.container.exec(*words)
    assert beside.returncode == 9
    assert f"port 6388 of {HEAD} cannot be opened" in beside.stderr


def test_a_stranger_gets_in_nowhere(head: Node, client: Node) -> None:
    """No ray.init, no Ray client, no job, no agent: the token is needed, and two of the ports
    are closed.
    """
    keys = [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}]
    with ThreadPoolExecutor() as pool:  # each tries for half a minute
        tries = pool.map(
            lambda key: client.python(JOIN, f"{HEAD}:6379", client.address, **key), keys
        )
        assert all(done.returncode and "InvalidAuthToken" in done.stderr for done in tries)
    for port in (10001, 8265):
        connect = f"import socket; socket.create_connection(('{HEAD}', {port}), 5)"
        assert "ConnectionRefusedError" in client.python(connect).stderr
    assert "Failed to connect to Ray at address" in client.python(SUBMIT, f"{HEAD}:8265").stderr
    agent = "import sys, urllib.request as u; u.urlopen(u.Request(sys.argv[1], b'{}'))"
    for port, path in ((6384, "api/job_agent/jobs/"), (6382, "get_or_create_runtime_env")):
        tried = client.python(agent, f"http://{HEAD}:{port}/{path}").stderr
        assert "HTTP Error 401" in tried or "Connection refused" in tried
    for path in ("nodes", "offer", "fetch", "model"):
        assert "401" in client.python(agent, f"http://{HEAD}:6388/{path}").stderr
    assert TOKEN not in head.logs()


def test_a_worker_that_joins_late_gets_the_model_and_the_answers_are_those_of_one_machine(
    one_machines_answers: list[str], worker: Node, serve: Serve, head: Node, client: Node
) -> None:
    assert serve.said(f"{worker.address} fetches {MODEL} from {HEAD}")
    assert greedy(client, head) == one_machines_answers


def test_secrets_are_not_copied_to_rays_workers(worker: Node, head: Node) -> None:
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


def test_status_shows_who_holds_what(worker: Node, head: Node) -> None:
    lines = head.python(STATUS).stdout.splitlines()
    assert [line.split()[:3] for line in lines[:2]] == [
        [HEAD, "ray-head", "1"],
        [worker.address, "ray-worker", "1"],
    ]
    assert all("1 of vLLM's processes" in line for line in lines[:2])
    assert head.parts() and worker.parts()


def test_a_killed_worker_is_named_requests_end_and_no_part_is_left(
    worker: Node, serve: Serve, head: Node, client: Node
) -> None:
    stream = Stream(client, head)
    worker.docker("kill")
    stream.must_end_in_error(NAMED_S)
    named = f"node {worker.address} has not answered"
    serve.wait_for(lambda: not head.is_ready() and serve.said(named), NAMED_S, "naming the node")
    head.wait_for(lambda: head.parts() == [], NAMED_S, "without parts of the model")


def test_the_service_comes_back_with_the_worker(
    worker: Node, serve: Serve, head: Node, client: Node, one_machines_answers: list[str]
) -> None:
    assert not head.is_ready()
    worker.docker("start")
    serve.wait_ready()
    assert greedy(client, head) == one_machines_answers


@pytest.mark.parametrize("fault", ["cut", "paused"])
def test_a_lost_worker_is_named_and_the_other_one_takes_its_place(
    fault: str, spare: Node, worker: Node, serve: Serve, head: Node, client: Node
) -> None:
    holder, other = (spare, worker) if spare.parts() else (worker, spare)
    assert not other.parts()
    other.wait_for(lambda: is_idle(head, other), 120, "idle in the cluster")
    named = f"node {holder.address} has not answered"
    before = serve.log.read_text().count(named)
    stream = Stream(client, head)
    holder.cut() if fault == "cut" else holder.pause()
    stream.must_end_in_error(NAMED_S)
    serve.wait_for(lambda: serve.log.read_text().count(named) > before, NAMED_S, "naming the node")
    serve.wait_ready()
    assert other.parts()
    assert greedy(client, head)
    if fault == "cut":
        holder.wait_for(lambda: holder.leftovers() == [], 60, "without leftovers")
        holder.join()
    else:
        told = len(ENDED.findall(holder.logs()))
        holder.docker("unpause")
        holder.wait_for(lambda: holder.parts() == [], 60, "without parts of the model")
        # The head has given it up; it ends its Ray and joins anew.
        holder.wait_for(lambda: len(ENDED.findall(holder.logs())) > told, 60, "told")


def is_idle(head: Node, node: Node) -> bool:
    """Whether the head counts `node` as there and without a part of the model."""
    lines = head.python(STATUS).stdout.splitlines()
    return any(
        line.split()[0] == node.address and "idle" in line and "lost" not in line for line in lines
    )


def test_with_the_head_everything_ends(spare: Node, worker: Node, serve: Serve, head: Node) -> None:
    workers = [worker, spare]
    for one in workers:
        one.wait_for(lambda one=one: one.parts() or is_idle(head, one), 180, "in the cluster")
    before = {one.address: len(ENDED.findall(one.logs())) for one in workers}
    head.docker("kill")
    serve.process.wait(10)
    for one in workers:
        one.wait_for(
            lambda one=one: len(ENDED.findall(one.logs())) > before[one.address], NAMED_S, "told"
        )
        one.wait_for(lambda one=one: one.leftovers() == [], NAMED_S, "without leftovers")

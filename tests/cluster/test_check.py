"""`nibble cluster check`, `serve` and `ray-worker` as typed in containers: what they say of a
cluster that cannot serve yet.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.support.cluster.cluster_nodes import DEMO, Node, node

pytestmark = [pytest.mark.docker, pytest.mark.slow]

HEAD, WORKER = "10.89.7.81", "10.89.7.82"
RAY = {"HEAD_IP": HEAD, "NUM_GPUS": "1"}
SOON = {"NIBBLE_CLUSTER_WAIT_SECONDS": "3"}
OF_THE_NETWORK = re.compile("all-reduce|firewall|NCCL|interface")


@pytest.fixture(scope="module")
def head(cpu_image: str, net: str) -> Iterator[Node]:
    with node(cpu_image, net, 81, "ray-head", **RAY) as found:
        found.wait_for(lambda: "Ray head is up" in found.logs(), 90, "up")
        yield found


def check(head: Node, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    options = [word for name, value in environ.items() for word in ("--env", f"{name}={value}")]
    return head.container.exec(
        "/opt/nibble/entrypoint.sh", "cluster", "check", *words, options=options
    )


def test_a_check_right_after_a_restart_of_the_head_names_what_is_missing_and_no_network(
    head: Node,
) -> None:
    head.docker("restart", "--time", "60")
    deadline = time.monotonic() + 90
    while head.logs().count("Ray head is up") < 2:
        assert time.monotonic() < deadline, head.logs()
        checked = check(head, **SOON)
        assert checked.returncode == 9, checked.stderr
        assert not OF_THE_NETWORK.search(checked.stderr), checked.stderr
    checked = check(head, **SOON)
    assert checked.returncode == 9
    assert f"only {HEAD} answers after 3 s" in checked.stderr
    assert not OF_THE_NETWORK.search(checked.stderr), checked.stderr


def test_a_node_with_too_little_memory_is_refused_by_name(
    head: Node, cpu_image: str, net: str
) -> None:
    """The engine alone needs 1.7 GiB on a CPU."""
    with node(cpu_image, net, 82, "ray-worker", options=["--memory", "1400m"], **RAY) as worker:
        worker.wait_for(lambda: "has joined" in worker.logs(), 120, "joined")
        for words in ((), (DEMO, "--max-model-len", "1024")):
            checked = check(head, *words, "--nnodes", "2", **SOON)
            said = checked.stdout + checked.stderr
            assert checked.returncode == 9, said
            assert re.search(
                rf"node {WORKER}: \S+ GiB of memory are available, but .* needed", said
            ), said


def test_serve_away_from_a_ray_node_is_sent_into_the_heads_container(
    head: Node, cpu_image: str, net: str
) -> None:
    ray = {"HEAD_IP": HEAD, "NIBBLE_CLUSTER": "ray", "TENSOR_PARALLEL_SIZE": "2", **SOON}
    with node(cpu_image, net, 83, "serve", DEMO, "--max-model-len", "1024", **ray) as found:
        assert found.container.exit_code() == 9
        last = found.logs().splitlines()[-1]
        assert "no Ray node runs on this machine" in last and "`docker exec HEAD" in last, last
        assert "start the missing nodes" not in last


@pytest.mark.parametrize(
    "words", [("cluster", "check"), ("ray-worker",), ("serve", DEMO)], ids=" ".join
)
def test_an_unknown_head_is_refused_within_seconds(
    cpu_image: str, net: str, words: tuple[str, ...]
) -> None:
    unknown = {"HEAD_IP": "nosuchhost", "NIBBLE_CLUSTER": "ray", "TENSOR_PARALLEL_SIZE": "2"}
    began = time.monotonic()
    with node(cpu_image, net, 84, *words, **unknown) as found:
        assert found.container.exit_code() == 9
        # 2 s for silent name servers, and the start of a container
        assert time.monotonic() - began < 10
        assert "HEAD_IP nosuchhost is neither an IPv4 address nor a known name" in found.logs()

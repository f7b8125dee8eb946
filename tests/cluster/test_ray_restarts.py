"""A Ray head that runs unattended, with the command of docs/cluster.md: a crash restarts the
server, a stop drains it first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support.cluster.cluster_nodes import DEMO, START_S, Node, Stream, node
from tests.support.paths import ROOT

pytestmark = [pytest.mark.docker, pytest.mark.slow]

HEAD = "10.89.7.91"
SERVE = f"NIBBLE_CLUSTER=ray nibble serve {DEMO} --max-model-len 1024"
KILL = """
import os, pathlib, signal
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    if (folder / "cmdline").read_bytes().startswith(b"VLLM::EngineCor"):
        os.kill(int(folder.name), signal.SIGKILL)
"""


def command() -> str:
    """The printed one. A CPU has no GPU for Ray to count, so that the head is told of one."""
    found = re.search(
        r"^    bash -c '\n(.*?)'\n", (ROOT / "docs" / "cluster.md").read_text(), re.M | re.S
    )
    assert found
    return (
        found[1]
        .replace("nibble serve MODEL", SERVE)
        .replace("nibble ray-head", "NUM_GPUS=1 nibble ray-head")
    )


@pytest.fixture(scope="module")
def head(cpu_image: str, net: str) -> Iterator[Node]:
    with node(cpu_image, net, 91, "bash", "-c", command(), HEAD_IP=HEAD) as found:
        found.wait_ready()
        yield found


def starts(head: Node) -> int:
    return head.logs().count("] ready in")


def test_the_server_is_started_again_after_its_engine_was_killed(head: Node) -> None:
    assert starts(head) == 1
    assert head.python(KILL).returncode == 0
    head.wait_for(lambda: not head.is_ready(), 60, "not ready")
    head.wait_for(lambda: starts(head) == 2, START_S, "ready again")
    head.wait_ready(20)


def test_a_stop_of_the_container_lets_a_stream_end_first(head: Node, client: Node) -> None:
    stream = Stream(client, head, max_tokens=100)
    head.docker("stop", "--time", "105")  # the drain and what docs/cluster.md adds to it
    assert head.container.exit_code() == 0, head.logs()[-4000:]
    stream.must_end_whole(10)
    assert "drains first" in head.logs()

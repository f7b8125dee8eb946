"""The image, a private network, a client on it, and what one machine answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster.cluster_nodes import DEMO, Node, greedy, network, node
from tests.support.docker.images import *  # noqa: F403 - fixtures


@pytest.fixture(scope="session")
def net(engine: None) -> Iterator[str]:
    with network() as name:
        yield name


@pytest.fixture(scope="session")
def client(cpu_image: str, net: str) -> Iterator[Node]:
    """A client's machine, without a token."""
    with node(cpu_image, net, 30, "sleep", "7200", NIBBLE_CLUSTER_TOKEN="") as found:
        yield found


@pytest.fixture(scope="session")
def one_machines_answers(cpu_image: str, net: str, client: Node) -> list[str]:
    """What a server on one machine says."""
    with node(cpu_image, net, 14, "serve", DEMO, "--max-model-len", "1024") as alone:
        alone.wait_ready()
        return greedy(client, alone)

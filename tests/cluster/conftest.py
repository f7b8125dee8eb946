"""The image, a private network, and what one machine answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster_nodes import DEMO, greedy, network, node
from images import *  # noqa: F403 - fixtures


@pytest.fixture(scope="module")
def net(engine: None) -> Iterator[str]:
    with network() as name:
        yield name


@pytest.fixture(scope="session")
def one_machines_answers(cpu_image: str) -> list[str]:
    """What a server on one machine says."""
    with network() as name, node(cpu_image, name, 14, "serve", DEMO, "--max-model-len", "1024") as alone:
        alone.wait_ready()
        return greedy(alone)

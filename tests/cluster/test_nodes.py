"""What the other tests here rely on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cluster.cluster_nodes import Node
from tests.support.docker.containers import Container


def test_a_node_that_has_ended_is_not_waited_for_and_its_last_words_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state: dict[str, Any] = {"Status": "exited"}
    monkeypatch.setattr(Container, "inspect", lambda self: {"State": state})
    monkeypatch.setattr(Container, "logs", lambda self: "nibble: error: its last words")
    monkeypatch.setattr(Node, "ask", lambda *given, **more: (0, None))
    with pytest.raises(
        AssertionError, match="it ended before it was ready\nnibble: error: its last words"
    ):
        Node(Container("id"), "10.89.7.9", "net").wait_ready(5)

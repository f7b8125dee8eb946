"""Requests to the agents of one node, or of all nodes at the same time."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nibble.cluster.agent import AgentError, call
from nibble.errors import ExitCode, NibbleError

FACTS_TIMEOUT_S = 20.0
_POLL_S = 0.2


@dataclass(frozen=True)
class Caller:
    """What a request needs: the head's address, the token and the environment (for TLS)."""

    head: str
    token: str
    environ: Mapping[str, str]

    def ask(
        self, address: str, path: str, body: Mapping[str, Any], timeout_s: float = FACTS_TIMEOUT_S
    ) -> dict[str, Any]:
        """The agent's JSON reply. Raises AgentError."""
        return call(address, path, self.token, body, timeout_s, self.environ)


def token_refused(head: str, token: str = "this node's token") -> NibbleError:
    """The error for status 401 of the head's agent."""
    return NibbleError(
        ExitCode.CLUSTER,
        what=f"the head at {head} refused {token}",
        expected="the head's token",
        action="set RAY_AUTH_TOKEN_FILE to a copy of the head's file",
    )


def ask_all(
    nodes: Sequence[Mapping[str, Any]],
    ask: Callable[[Mapping[str, Any]], Any],
    over: threading.Event,
) -> list[tuple[Mapping[str, Any], Any]]:
    """Send a request to all nodes at the same time: (node, answer or AgentError) in order of
    arrival.

    Returns without the missing answers as soon as `over` is set.
    """
    answers: queue.SimpleQueue[tuple[Mapping[str, Any], Any]] = queue.SimpleQueue()

    def work(node: Mapping[str, Any]) -> None:
        try:
            answers.put((node, ask(node)))
        except Exception as error:
            answers.put((node, error))

    for node in nodes:
        # A daemon, so that a thread without an answer does not hold up the end of the process.
        threading.Thread(target=work, args=(node,), name="preflight", daemon=True).start()
    received: list[tuple[Mapping[str, Any], Any]] = []
    while len(received) < len(nodes) and not over.is_set():
        with contextlib.suppress(queue.Empty):
            received.append(answers.get(timeout=_POLL_S))
            if isinstance(error := received[-1][1], Exception) and not isinstance(
                error, AgentError
            ):
                raise error
    return received

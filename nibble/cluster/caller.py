"""How one node asks others: one call, or all nodes at the same time."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nibble.cluster.agent import AgentError, call

FACTS_TIMEOUT_S = 20.0
_LOOK_S = 0.2


@dataclass(frozen=True)
class Caller:
    """How to reach the agents: the token and the environment (TLS). `head` is this cluster's."""

    head: str
    token: str
    environ: Mapping[str, str]

    def ask(
        self, address: str, path: str, body: Mapping[str, Any], timeout_s: float = FACTS_TIMEOUT_S
    ) -> dict[str, Any]:
        return call(address, path, self.token, body, timeout_s, self.environ)


def ask_all(
    nodes: Sequence[Mapping[str, Any]],
    ask: Callable[[Mapping[str, Any]], Any],
    over: threading.Event,
) -> list[tuple[Mapping[str, Any], Any]]:
    """Ask all nodes at the same time: (node, its answer or the AgentError) in the order of the
    answers, so far as they came before `over` was set.
    """
    answers: queue.SimpleQueue[tuple[Mapping[str, Any], Any]] = queue.SimpleQueue()

    def work(node: Mapping[str, Any]) -> None:
        try:
            answers.put((node, ask(node)))
        except Exception as error:
            answers.put((node, error))

    for node in (
        nodes
    ):  # daemons: one that still waits for its answer must not hold up the end of the process
        threading.Thread(target=work, args=(node,), name="preflight", daemon=True).start()
    found: list[tuple[Mapping[str, Any], Any]] = []
    while len(found) < len(nodes) and not over.is_set():
        with contextlib.suppress(queue.Empty):
            found.append(answers.get(timeout=_LOOK_S))
            if isinstance(error := found[-1][1], Exception) and not isinstance(error, AgentError):
                raise error
    return found

"""The interface of a server that spans several machines (nibble/cluster/watch.py) for one run of
vLLM.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from nibble.errors import NibbleError
from nibble.serve.control import Answers, Turn


class Nodes(Protocol):
    """The other machines of one run. Called from the supervisor's threads."""

    def control(self, answers: Answers) -> Turn:
        """The control port for this run; it stays open between runs."""
        ...

    def feed(self, line: str) -> None:
        """A line of vLLM's log."""
        ...

    def reports(self) -> Mapping[str, list[Mapping[str, Any]]]:
        """Node -> the reports of its workers."""
        ...

    def told_to_stop(self) -> None:
        """Called in a signal handler: a lost node starts no new run from now on."""
        ...

    def was_told_to_stop(self) -> bool:
        """Whether a stop signal came, also before this run had a handler for it."""
        ...

    def died_here(self) -> None:
        """A vLLM process ended on this machine."""
        ...

    def run(
        self,
        fail: Callable[[NibbleError], None],
        drain: Callable[[str], None],
        over: threading.Event,
    ) -> None:
        """Until `over`: `fail` gets the error of a lost node, `drain` the reason of a leaving
        head.
        """
        ...

"""Watches the nodes of a server while its vLLM runs: lost nodes and ended processes."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nibble.cluster.roster import BEAT_S, LOST_S
from nibble.errors import ExitCode, NibbleError
from nibble.serve.control import Answers, Turn

if TYPE_CHECKING:
    from nibble.cluster.coordinator import Cluster

# vllm 0.32 v1/executor/ray_executor_v2.py:522
_DEAD_WORKER = re.compile(
    r"RayWorkerProc rank=\[([\d, ]+)\] died unexpectedly, shutting down executor"
)


class NodeLost(NibbleError):
    """A node that the model needs is lost, or a process on it."""

    def __init__(self, why: str) -> None:
        super().__init__(
            ExitCode.ENGINE_DIED,
            what=why,
            action="see that node's log; it may rejoin at any time",
        )


class Watch:
    """Watches one run. The supervisor calls `run` in a thread and `feed` with every log line."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._dead: tuple[str, float] | None = None  # ranks that Ray's executor lost, and the time

    def control(self, answers: Answers) -> Turn:
        """The control port for this run; it stays open between runs."""
        return Turn(self._cluster.control, answers)

    def feed(self, line: str) -> None:
        """Read a line of vLLM's log. Ray's executor logs which rank's process ended; after that
        vLLM may end, or wait forever.
        """
        if self._dead is None and (match := _DEAD_WORKER.search(line)):
            self._dead = match[1], time.monotonic()

    def reports(self) -> dict[str, list[Mapping[str, Any]]]:
        """See `CurrentRun.reports`."""
        return self._cluster.current_run.reports()

    def told_to_stop(self) -> None:
        """Called in a signal handler. From now on a lost node does not start another run."""
        self._cluster.stop.set()

    def was_told_to_stop(self) -> bool:
        """Whether a stop signal came, also between two runs."""
        return self._cluster.stop.is_set()

    def died_here(self) -> None:
        """Note that a process of vLLM ended on this machine. Later ends on other nodes are
        consequences.
        """
        self._cluster.current_run.died_here()

    def dead_worker(self) -> str | None:
        """A sentence about a worker that Ray's executor lost and whose node reports no end; None if
        there is none.
        """
        if self._dead is None:
            return None
        ranks = [int(rank) for rank in self._dead[0].split(",")]
        where = [self._cluster.current_run.node_of_rank(rank) for rank in ranks]
        names = ", ".join(
            f"rank {rank} on {node or 'a node'}" for rank, node in zip(ranks, where, strict=True)
        )
        return f"a worker process of vLLM ended by itself: {names}; all nodes still answer"

    def run(
        self,
        fail: Callable[[NibbleError], None],
        drain: Callable[[str], None],
        over: threading.Event,
    ) -> None:
        """Until `over` is set: call `fail` with the error of a lost node, or of a worker that its
        node does not report. Call `drain` when the head of a Ray cluster is about to stop.

        During a drain this thread only tells the head that the server still runs: the drain has a
        separate limit.
        """
        is_draining = False
        while not over.wait(BEAT_S):
            loss = self._cluster.current_run.loss()
            if is_draining or self._cluster.stop.is_set():
                continue
            if self._cluster.membership.head_stops:
                is_draining = True
                drain(f"the Ray head at {self._cluster.head} is stopping")
            elif loss is not None:
                fail(loss)
                return
            elif self._dead is not None and time.monotonic() - self._dead[1] > LOST_S:
                fail(NodeLost(str(self.dead_worker())))
                return

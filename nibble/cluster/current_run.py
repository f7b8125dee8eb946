"""One run of vLLM on several nodes: its nodes, its workers' reports, and what ends it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from nibble.cluster.agent import AgentError
from nibble.cluster.complete import SEE_NODE, living
from nibble.cluster.membership import Membership
from nibble.cluster.roster import LOST_S, ended_process, lost_node
from nibble.cluster.watch import NodeLost
from nibble.errors import ExitCode, NibbleError

# Two ends on two machines that are this close have no known order.
SAME_MOMENT_S = 0.5
# vLLM has ended by then, or goes on without the process (launch.ENGINE_END_S).
FOLLOWS_S = 20.0


class CurrentRun:
    """The state of the run that a server has now; `begin` starts it afresh."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._members: dict[str, dict[str, Any]] = {}  # by address
        self._ranks: dict[tuple[str, int], int] = {}  # with Ray: (address, pid) -> rank
        self._began_at, self._died_here_at = 0.0, float("inf")
        self._nodes: Sequence[dict[str, Any]] = ()  # the head's list at the last check
        self.was_ready = False

    def begin(self) -> None:
        """Forget what belongs to the run before."""
        self.was_ready, self._began_at = False, time.monotonic()
        self._died_here_at, self._ranks = float("inf"), {}

    def set_members(self, nodes: Sequence[dict[str, Any]]) -> None:
        """The nodes that the next run needs. With Ray pass none: Ray chooses the nodes."""
        self._members = {node["address"]: node for node in nodes}

    # --- losses ---

    def lost(self) -> str | None:
        """Which node of the running server is lost, as a sentence; None if all are there."""
        membership = self._membership
        self._nodes = membership.nodes()
        if membership.head_silence_s >= LOST_S:
            return (
                f"the head at {membership.head} has not answered for"
                f" {membership.head_silence_s:.0f} s"
            )
        if membership.roster is None:
            # Ray chooses the nodes: a node with a worker of the model is a member.
            self._members |= {
                node["address"]: node
                for node in self._nodes
                if node["busy"] and node["age_s"] < LOST_S and node["address"] not in self._members
            }
        return lost_node(list(self._members.values()), self._nodes, membership.left)

    def loss(self) -> NibbleError | None:
        """The error that ends this run, or None.

        After NodeLost a new run starts. Another error means that a process ended before the server
        was ready, which a new run would most likely repeat.
        """
        if why := self.lost():
            return NodeLost(why)
        if why := ended_process(living(self._nodes), self._concerns_run):
            what = f"{why}, before the server was ready"
            return (
                NodeLost(why)
                if self.was_ready
                else NibbleError(ExitCode.ENGINE_DIED, what=what, action=SEE_NODE)
            )
        return None

    def _concerns_run(self, node: Mapping[str, Any], end: Mapping[str, Any]) -> bool:
        """Whether a process that ended on another node belongs to this run and did not end because
        of a process here.
        """
        ended_at = time.monotonic() - end["ago_s"]
        if ended_at < self._began_at or SAME_MOMENT_S < ended_at - self._died_here_at < FOLLOWS_S:
            return False
        if self._membership.roster:
            return end["run"] == self._membership.roster.run
        return (node["address"], end["pid"]) in self._ranks

    def died_here(self) -> None:
        """Note that a process of vLLM ended on this machine."""
        self._died_here_at = time.monotonic()

    # --- workers ---

    def node_of_rank(self, rank: int) -> str | None:
        """With Ray: the address of the node that runs `rank`, known once its worker reported."""
        return next((address for (address, _), known in self._ranks.items() if known == rank), None)

    def reports(self) -> dict[str, list[Mapping[str, Any]]]:
        """Reports of the workers that are not children of this process, by node name.

        A node that does not answer has an empty list. With Ray every worker is a child of a Ray
        node, also on this machine.
        """
        membership = self._membership
        if membership.roster:
            own_address = membership.place.address
            nodes = [node for address, node in self._members.items() if address != own_address]
        else:
            nodes = [node for node in membership.nodes() if node["busy"] and node["age_s"] < LOST_S]
        reports: dict[str, list[Mapping[str, Any]]] = {}
        for node in nodes:
            try:
                answer = membership.caller.ask(node["address"], "/proof", {})
                reports[node["name"]] = answer["reports"]
                ranks = answer.get("ranks") or {}
                self._ranks |= {(node["address"], int(pid)): rank for pid, rank in ranks.items()}
            except AgentError:
                reports[node["name"]] = []
        return reports

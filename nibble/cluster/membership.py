"""The nodes of a cluster as its server sees them: the head's list, and what a start still misses.

Without Ray the server's process is the head and reads its own roster. With Ray it asks the head's
agent.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nibble.cluster.agent import AgentError
from nibble.cluster.caller import Caller, token_refused
from nibble.cluster.complete import INTO_THE_HEAD, Missing, living, missing_gpus, missing_ranks
from nibble.cluster.lock import Claim
from nibble.cluster.node import Place
from nibble.cluster.roster import LOST_S, STOPPING, Roster

if TYPE_CHECKING:
    from nibble.plan.plan import Plan

STOP_S = 30.0  # added to the drain: time for vLLM's processes to end


class Membership:
    """The nodes of one cluster. `roster` is the head's own list, None with Ray."""

    def __init__(
        self, plan: Plan, place: Place, caller: Caller, roster: Roster | None, claim: Claim
    ) -> None:
        self.roster, self.caller, self.place = roster, caller, place
        self.left: Mapping[str, str] = {}  # address -> error of a node that left with one
        self.head_stops = self.is_serving = False
        self._topology, self._claim = plan.topology, claim
        self._stops_within_s = plan.settings.drain_seconds + STOP_S
        self._last_nodes: list[dict[str, Any]] = []
        self._answered_at = time.monotonic()

    @property
    def head(self) -> str:
        """The head's address."""
        return self.caller.head

    @property
    def head_silence_s(self) -> float:
        """Seconds since the head last answered; 0 if this process is the head."""
        return 0.0 if self.roster else time.monotonic() - self._answered_at

    def nodes(self) -> list[dict[str, Any]]:
        """The head's list of nodes. If a Ray cluster's head does not answer: its last list.

        Raises CLUSTER if the head refuses the token.
        """
        if self.roster:
            self.left = self.roster.left
            return self.roster.nodes()
        server = {"server": self._claim.who, "stops_within_s": self._stops_within_s}
        try:
            answer = self.caller.ask(self.head, "/nodes", server if self.is_serving else {}, 3.0)
            self._last_nodes, self.left = answer["nodes"], answer.get("left", {})
            self._answered_at = time.monotonic()
            self.head_stops = answer.get("state") == STOPPING
        except AgentError as error:
            if error.status == 401:
                raise token_refused(self.head) from None
        return self._last_nodes

    def missing(self) -> Missing | None:
        """What the plan needs and the cluster does not have yet."""
        nodes = self.nodes()  # asked first: an answer resets head_silence_s
        alive = living(nodes) if self.head_silence_s < LOST_S else []
        if self._topology.nodes is not None:
            return missing_ranks(alive, self._topology.nodes)
        if self.head_stops:
            return Missing(f"the Ray head at {self.head} is stopping", "start it again")
        if not alive:
            return Missing(
                f"no Ray head answers at {self.head}",
                "start `ray-head` there, or correct HEAD_IP",
            )
        if not any(node["address"] == self.place.address for node in alive):
            return Missing(
                f"no Ray node runs on this machine ({self.place.address})", INTO_THE_HEAD
            )
        return missing_gpus(alive, self._topology.ranks)

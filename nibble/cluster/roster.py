"""The head's list of nodes, kept up to date by their heartbeats."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BEAT_S = 1.0
FORGET_S = 600.0  # a lost pod returns with another address; the old one is dropped after this
SETTLE_S = 0.5  # the time that every node has to report an end
STOPPING = "stopping"  # state of a Ray head that stops: servers drain
SERVER_S = 4.0  # a server that has not asked for the nodes for this long has ended
# A node without a heartbeat for this long is lost.
LOST_S = 10.0


@dataclass
class Node:
    """A node as its last heartbeat described it.

    `session` is new for each start of the process, so that a restarted node differs from the one
    before. `rank` is vLLM's node rank, None with Ray. `busy` counts vLLM's workers. `ended` are the
    last workers that ended by themselves: "run", "pid", "why" and "at" (of the roster's clock).
    """

    address: str
    session: str
    role: str
    rank: int | None
    gpus: int
    busy: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    seen: float = 0.0
    skew_s: float = 0.0
    ended: Sequence[Mapping[str, Any]] = ()

    @property
    def name(self) -> str:
        """The name in messages."""
        return self.address if self.rank is None else f"{self.address} (rank {self.rank})"


class Refused(ValueError):
    """A heartbeat or a claim that the head does not accept. The text goes to its sender."""


class Roster:
    """The head's list. `run` counts the server's starts, from 0. `expects` is the required number
    of nodes, None if the head does not know it.
    """

    def __init__(
        self, session: str, clock: Callable[[], float] = time.monotonic, expects: int | None = None
    ) -> None:
        self.session, self.expects = session, expects
        self._clock = clock
        self._lock = threading.Lock()
        self._nodes: dict[str, Node] = {}
        self._left: dict[str, str] = {}
        self._claim = ("", "", 0.0)  # owner, its description, time of the last renewal
        # server -> (time of its last request, seconds that its stop may take)
        self._servers: dict[str, tuple[float, float]] = {}
        self.run = 0
        self.state = "waiting"

    def beat(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Record a heartbeat; the reply to its node. Raises Refused for a rank that another living
        node has.
        """
        now = self._clock()
        facts = dict(message.get("facts") or {})
        node = Node(
            address=str(message["address"]),
            session=str(message["session"]),
            role=str(message["role"]),
            rank=None if message.get("rank") is None else int(message["rank"]),
            gpus=int(message.get("gpus") or 0),
            busy=int(message.get("busy") or 0),
            facts=facts,
            seen=now,
            skew_s=float(message["time"]) - time.time(),
            ended=[{**end, "at": now - float(end["ago_s"])} for end in message.get("ended") or ()],
        )
        with self._lock:
            if node.role == "ray-worker" and message.get("head") not in (None, "", self.session):
                # Its Ray belongs to the head before this one. The reply tells it, so it ends and
                # joins again.
                self._nodes.pop(node.address, None)
                return self._reply(node)
            for other in list(self._nodes.values()):
                if node.rank is None or other.rank != node.rank or other.address == node.address:
                    continue
                if now - other.seen < LOST_S:
                    raise Refused(f"{other.address} has rank {node.rank}")
                del self._nodes[other.address]
            before = self._nodes.get(node.address)
            if before is not None and before.session == node.session and not node.facts:
                node.facts = before.facts
            self._nodes[node.address] = node
            self._left.pop(node.address, None)
            return self._reply(node)

    def _reply(self, node: Node) -> dict[str, Any]:
        return {
            "session": self.session,
            "run": self.run,
            "state": self.state,
            "wants_facts": not node.facts,
        }

    def leave(self, address: str, why: str = "") -> None:
        """Remove a node that leaves. `why` is its error, empty after a stop signal."""
        with self._lock:
            self._nodes.pop(address, None)
            if why:
                self._left[address] = why

    def claim(self, who: str, what: str) -> None:
        """Give the nodes to `who` until it releases them or does not renew the claim for LOST_S.

        Raises Refused with the owner's description if another one has them.
        """
        now = self._clock()
        with self._lock:
            holder, description, renewed = self._claim
            if holder not in ("", who) and now - renewed < LOST_S:
                raise Refused(description)
            self._claim = (who, what, now)

    def release(self, who: str) -> None:
        """End the claim of `who`."""
        with self._lock:
            if self._claim[0] == who:
                self._claim = ("", "", 0.0)

    def note_server(self, who: str, stops_within_s: float) -> None:
        """Record that a server runs on these nodes and how long its stop may take."""
        with self._lock:
            self._servers[who] = (self._clock(), stops_within_s)

    def forget_server(self, who: str) -> None:
        """Record that a server has ended."""
        with self._lock:
            self._servers.pop(who, None)

    def servers_stop_within_s(self) -> float:
        """Seconds that the slowest server may take to stop; 0 if none runs."""
        now = self._clock()
        with self._lock:
            return max(
                (limit for seen, limit in self._servers.values() if now - seen < SERVER_S),
                default=0.0,
            )

    @property
    def left(self) -> dict[str, str]:
        """Address -> error, of the nodes that left with one."""
        with self._lock:
            return dict(self._left)

    def nodes(self) -> list[dict[str, Any]]:
        """Every node seen within FORGET_S that has not left, with the age of its last heartbeat."""
        now = self._clock()
        with self._lock:
            self._nodes = {
                address: node for address, node in self._nodes.items() if now - node.seen < FORGET_S
            }
            nodes = [self._to_json(node, now) for node in self._nodes.values()]
        return sorted(nodes, key=lambda node: (node["rank"] or 0, node["address"]))

    def _to_json(self, node: Node, now: float) -> dict[str, Any]:
        """`node` as plain data."""
        ended = [{**end, "ago_s": now - end["at"]} for end in node.ended]
        return vars(node) | {"name": node.name, "age_s": now - node.seen, "ended": ended}


def head_first(nodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`nodes` with the head's first."""
    return sorted(nodes, key=lambda node: node["role"] != "ray-head" and node["rank"] != 0)


def lost_node(
    before: list[dict[str, Any]],
    now: list[dict[str, Any]],
    left: Mapping[str, str] | None = None,
) -> str | None:
    """Which node of `before` is lost, and how; None if all are there. `left` is the roster's."""
    current = {node["address"]: node for node in now}
    for node in before:
        node_now = current.get(node["address"])
        if node_now is None:
            why = (left or {}).get(node["address"])
            return f"node {node['name']} has left" + (f": {why}" if why else "")
        if node_now["session"] != node["session"]:
            return f"node {node['name']} restarted"
        if node_now["age_s"] >= LOST_S:
            return f"node {node['name']} has not answered for {node_now['age_s']:.0f} s"
    return None


def ended_process(
    nodes: Sequence[Mapping[str, Any]],
    matters: Callable[[Mapping[str, Any], Mapping[str, Any]], bool],
) -> str | None:
    """Which process of vLLM on `nodes` ended by itself first; ends of others may follow from it.

    None while all run, and until SETTLE_S after the first known end, so that each node has time to
    report. Also None until every other node with workers has sent a later heartbeat: a node that is
    lost with all its processes may be the cause, and counts as lost only after LOST_S.

    `matters` tells for a node and one of its `ended` whether it concerns this run.
    """
    ends = [
        (end["ago_s"], node, end)
        for node in nodes
        for end in node.get("ended") or ()
        if matters(node, end)
    ]
    ago_s, node, end = max(ends, key=lambda known: known[0], default=(0.0, {}, {}))
    silent = [
        other for other in nodes if other["busy"] and other is not node and other["age_s"] > ago_s
    ]
    return f"node {node['name']}: {end['why']}" if ago_s >= SETTLE_S and not silent else None

"""Who takes part: the head's list of nodes, kept alive by their beats."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BEAT_S = 1.0
FORGET_S = (
    600.0  # a pod that was lost comes back with another address; nibble then forgets the old one
)
SETTLE_S = 0.5
STOPPING = "stopping"  # the state of a Ray head that stops: servers drain
SERVER_S = 4.0  # a server that has not asked for the nodes for so long has ended
# without a beat for so long a node counts as lost; the issue allows 30 s until the server has said
# so
LOST_S = 10.0


@dataclass
class Node:
    """A node as its last beat told.

    `session` is one life of its process, so that a node that restarted is told from the one
    that was there. `rank` is vLLM's node rank, None with Ray. `busy` counts processes of vLLM's
    that hold parts of the model. `ended` are those of them that ended by themselves, the last ones:
    "run", "pid", "why" and "at" (of the roster's clock).
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
        """For people."""
        return self.address if self.rank is None else f"{self.address} (rank {self.rank})"


class Refused(ValueError):
    """A beat or a claim that cannot be accepted; the text is for its sender."""


class Roster:
    """The head's list. `run` counts the server's starts: 0 while there is none. `expects` is how
    many nodes there have to be, None where the head does not know.
    """

    def __init__(
        self, session: str, clock: Callable[[], float] = time.monotonic, expects: int | None = None
    ) -> None:
        self.session, self.expects = session, expects
        self._clock = clock
        self._lock = threading.Lock()
        self._nodes: dict[str, Node] = {}
        self._left: dict[str, str] = {}
        self._claim = ("", "", 0.0)  # by whom, in words what for, and when it was last said
        self._servers: dict[
            str, tuple[float, float]
        ] = {}  # who -> when it last asked, how long its stop may take
        self.run = 0
        self.state = "waiting"

    def beat(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Note a node's sign of life; the reply it gets. Raises Refused for a rank that another
        living node has.
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
            ended=[{**one, "at": now - float(one["ago_s"])} for one in message.get("ended") or ()],
        )
        with self._lock:
            if node.role == "ray-worker" and message.get("head") not in (None, "", self.session):
                # Its Ray belongs to the head before this one: it is told so, ends and joins anew.
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
        """A node that leaves: it stops on request, or `why` says why."""
        with self._lock:
            self._nodes.pop(address, None)
            if why:
                self._left[address] = why

    def claim(self, who: str, what: str) -> None:
        """`who` has the nodes to itself until it releases them or has not asked again for LOST_S.

        Raises Refused with `what` the one who has them says of itself.
        """
        now = self._clock()
        with self._lock:
            holder, said, asked = self._claim
            if holder not in ("", who) and now - asked < LOST_S:
                raise Refused(said)
            self._claim = (who, what, now)

    def release(self, who: str) -> None:
        """The end of a claim of `who`."""
        with self._lock:
            if self._claim[0] == who:
                self._claim = ("", "", 0.0)

    def note_server(self, who: str, stops_within_s: float) -> None:
        """A server runs on these nodes; its stop may take so long."""
        with self._lock:
            self._servers[who] = (self._clock(), stops_within_s)

    def forget_server(self, who: str) -> None:
        """It has ended."""
        with self._lock:
            self._servers.pop(who, None)

    def servers_stop_within_s(self) -> float:
        """How long the stop of the slowest server may take; 0 where none runs."""
        now = self._clock()
        with self._lock:
            return max(
                (limit for asked, limit in self._servers.values() if now - asked < SERVER_S),
                default=0.0,
            )

    @property
    def left(self) -> dict[str, str]:
        """Address -> why, of the nodes that went with an error."""
        with self._lock:
            return dict(self._left)

    def nodes(self) -> list[dict[str, Any]]:
        """Every node seen within FORGET_S and not gone in good order, with the age of its last
        sign of life.
        """
        now = self._clock()
        with self._lock:
            self._nodes = {
                address: node for address, node in self._nodes.items() if now - node.seen < FORGET_S
            }
            found = [self._told(node, now) for node in self._nodes.values()]
        return sorted(found, key=lambda one: (one["rank"] or 0, one["address"]))

    def _told(self, node: Node, now: float) -> dict[str, Any]:
        """`node` as plain data."""
        ended = [{**one, "ago_s": now - one["at"]} for one in node.ended]
        return vars(node) | {"name": node.name, "age_s": now - node.seen, "ended": ended}


def head_first(nodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`nodes` with the head's own before the others."""
    return sorted(nodes, key=lambda node: node["role"] != "ray-head" and node["rank"] != 0)


def lost_node(
    before: list[dict[str, Any]],
    now: list[dict[str, Any]],
    left: Mapping[str, str] | None = None,
) -> str | None:
    """Which node of `before` is gone, and how, in words; None while all are there. `left` is the
    roster's.
    """
    current = {node["address"]: node for node in now}
    for node in before:
        found = current.get(node["address"])
        if found is None:
            why = (left or {}).get(node["address"])
            return f"node {node['name']} has left" + (f": {why}" if why else "")
        if found["session"] != node["session"]:
            return f"node {node['name']} restarted"
        if found["age_s"] >= LOST_S:
            return f"node {node['name']} has not answered for {found['age_s']:.0f} s"
    return None


def ended_process(
    nodes: Sequence[Mapping[str, Any]],
    matters: Callable[[Mapping[str, Any], Mapping[str, Any]], bool],
) -> str | None:
    """Which process of vLLM's on `nodes` ended by itself first, in words: the ends of others may
    follow from it.

    None while all run, and until SETTLE_S after the first end that is known, so that each node had
    the time to tell. None too until every other node that holds parts of the model has given a sign
    of life since: the end may follow from one that is gone with all its processes, which counts as
    lost only later.

    `matters` says of a node and one of its `ended` whether it concerns this run.
    """
    ends = [
        (end["ago_s"], node, end)
        for node in nodes
        for end in node.get("ended") or ()
        if matters(node, end)
    ]
    ago_s, node, end = max(ends, key=lambda one: one[0], default=(0.0, {}, {}))
    silent = [one for one in nodes if one["busy"] and one is not node and one["age_s"] > ago_s]
    return f"node {node['name']}: {end['why']}" if ago_s >= SETTLE_S and not silent else None

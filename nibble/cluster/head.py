"""The head's side of the cluster, and how members react to the head's answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from nibble.cluster.agent import Handler
from nibble.cluster.caller import token_refused
from nibble.cluster.member import Member
from nibble.cluster.roster import Roster
from nibble.errors import ExitCode, NibbleError
from nibble.plan.cluster_ports import AGENT_PORT


class Running(Protocol):
    """An object with a thread that `start` starts and `close` ends."""

    def start(self) -> Any: ...

    def close(self) -> None: ...


@contextlib.contextmanager
def running(service: Running) -> Iterator[None]:
    """Start it, and close it at the end."""
    service.start()
    try:
        yield
    finally:
        service.close()


@contextlib.contextmanager
def leaving(member: Member) -> Iterator[None]:
    """Tell the head when this node ends, with the error if there is one. The caller starts the
    member.
    """
    why = ""
    try:
        yield
    except NibbleError as error:
        why = error.line()
        raise
    finally:
        member.leave(why)


def head_handlers(roster: Roster) -> dict[str, Handler]:
    """The agent's paths that only a head has."""

    def claim(body: Mapping[str, Any]) -> dict[str, Any]:
        roster.claim(str(body["who"]), str(body["what"]))
        return {}

    def release(body: Mapping[str, Any]) -> dict[str, Any]:
        roster.release(str(body["who"]))
        return {}

    def ended(body: Mapping[str, Any]) -> dict[str, Any]:
        roster.forget_server(str(body["server"]))
        return {}

    def leave(body: Mapping[str, Any]) -> dict[str, Any]:
        roster.leave(str(body["address"]), str(body.get("why") or ""))
        return {}

    def nodes(body: Mapping[str, Any]) -> dict[str, Any]:
        if who := body.get("server"):
            roster.note_server(str(who), float(body["stops_within_s"]))
        return {
            "nodes": roster.nodes(),
            "left": roster.left,
            "run": roster.run,
            "state": roster.state,
            "session": roster.session,
            "expects": roster.expects,
        }

    handlers: dict[str, Handler] = {"/beat": roster.beat, "/claim": claim, "/release": release}
    return handlers | {"/leave": leave, "/nodes": nodes, "/ended": ended}


def refuse(member: Member) -> None:
    """Raise CLUSTER if the head's answer refuses this node. A missing answer does not count."""
    error = member.error
    if error is None or error.status == 0:
        return
    if error.status == 401:
        raise token_refused(member.head)
    if error.status == 404:
        what = f"the node at {member.head} is not a head"
        raise NibbleError(
            ExitCode.CLUSTER,
            what=what,
            expected="rank 0 or `ray-head` at this address",
            action="correct HEAD_IP",
        )
    what = f"the head at {member.head} refused this node: {error}"
    raise NibbleError(
        ExitCode.CLUSTER,
        what=what,
        expected="one node for each rank",
        action="correct NIBBLE_NODE_RANK or stop the other node",
    )


def lost_head(member: Member) -> str | None:
    """Why the head counts as lost, or None."""
    if member.has_new_head:
        return f"the head at {member.head} restarted"
    if not member.has_lost_head:
        return None
    why = f": {member.error}" if member.error else ""
    return (
        f"no answer from the head at {member.head}:{AGENT_PORT} for {member.silence_s:.0f} s{why}"
    )

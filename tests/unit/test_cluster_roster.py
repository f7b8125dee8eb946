"""Who is there, who is lost, and what the token opens."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from nibble.cluster import agent as agent_module
from nibble.cluster.agent import Agent, AgentError, call, connect
from nibble.cluster.head import head_handlers, lost_head, refuse
from nibble.cluster.member import End, Member
from nibble.cluster.roster import (
    FORGET_S,
    LOST_S,
    SERVER_S,
    Refused,
    Roster,
    ended_process,
    lost_node,
)
from nibble.errors import ExitCode, NibbleError
from tests.support.servers.serving import free_port

TOKEN = "0123456789abcdef"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def message(
    address: str = "10.0.0.2", session: str = "a", rank: int | None = 1, **more: Any
) -> dict[str, Any]:
    return {
        "address": address,
        "session": session,
        "role": "serve",
        "rank": rank,
        "time": time.time(),
        **more,
    }


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def roster(clock: Clock) -> Roster:
    return Roster("head", clock)


def test_facts_are_asked_for_once_in_a_life(roster: Roster) -> None:
    assert roster.beat(message())["wants_facts"] is True
    assert roster.beat(message(facts={"vllm": "0.32.0"}))["wants_facts"] is False
    assert roster.beat(message())["wants_facts"] is False
    assert roster.nodes()[0]["facts"] == {"vllm": "0.32.0"}
    assert roster.beat(message(session="b"))["wants_facts"] is True


def test_a_rank_belongs_to_the_first_living_node_that_has_it(roster: Roster, clock: Clock) -> None:
    roster.beat(message("10.0.0.2"))
    with pytest.raises(Refused, match=r"10\.0\.0\.2 has rank 1"):
        roster.beat(message("10.0.0.3"))
    clock.now += LOST_S
    roster.beat(message("10.0.0.3"))


def test_a_node_that_was_lost_is_forgotten_when_another_has_its_rank_or_after_a_while(
    roster: Roster, clock: Clock
) -> None:
    roster.beat(message("10.0.0.2"))
    roster.beat(message("10.0.0.9", rank=None))
    clock.now += LOST_S
    roster.beat(message("10.0.0.3"))
    assert [node["address"] for node in roster.nodes()] == ["10.0.0.9", "10.0.0.3"]
    clock.now += FORGET_S - LOST_S
    assert [node["address"] for node in roster.nodes()] == ["10.0.0.3"]


@pytest.mark.parametrize(
    ("then", "words"),
    [
        ("silent", r"10\.0\.0\.2 \(rank 1\) has not answered for 10 s"),
        ("anew", "restarted"),
        ("left", "has left"),
    ],
)
def test_a_lost_node_is_named_with_how_it_was_lost(
    roster: Roster, clock: Clock, then: str, words: str
) -> None:
    roster.beat(message())
    before = roster.nodes()
    assert lost_node(before, roster.nodes()) is None
    if then == "silent":
        clock.now += LOST_S
    elif then == "anew":
        roster.beat(message(session="b"))
    else:
        roster.leave("10.0.0.2")
    found = lost_node(before, roster.nodes())
    assert found is not None
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(found)


def test_a_node_that_left_with_an_error_is_named_with_it_until_it_is_back(roster: Roster) -> None:
    roster.beat(message())
    before = roster.nodes()
    roster.leave("10.0.0.2", "memory is short")
    lost = lost_node(before, roster.nodes(), roster.left)
    assert lost == "node 10.0.0.2 (rank 1) has left: memory is short"
    roster.beat(message())
    assert roster.left == {}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Roster]:
    """A real agent on a free port."""
    monkeypatch.setattr(agent_module, "AGENT_PORT", free_port())
    roster = Roster("head")
    handlers = head_handlers(roster) | {"/broken": broken}
    agent = Agent("127.0.0.1", TOKEN, handlers).start()
    yield roster
    agent.close()


def broken(body: Mapping[str, Any]) -> dict[str, Any]:
    raise PermissionError(13, "Permission denied", "/sys/class/net")


def member(token: str = TOKEN, address: str = "127.0.0.2", rank: int | None = 1) -> Member:
    return Member("127.0.0.1", token, address, "serve", rank, 0, {}, lambda: {"vllm": "0.32.0"})


def test_a_beat_reaches_the_roster_and_learns_the_run(served: Roster) -> None:
    served.run, served.state = 3, "ready"
    one = member()
    one.beat()
    assert (one.reply["run"], one.reply["state"], one.error) == (3, "ready", None)
    assert served.nodes()[0]["facts"] == {"vllm": "0.32.0"}
    one.leave()
    assert served.nodes() == []


def test_no_beat_arrives_after_the_goodbye(served: Roster) -> None:
    one = member()
    one.facts = lambda: time.sleep(0.5) or {"vllm": "0.32.0"}
    one.start()
    time.sleep(0.1)
    one.leave()
    time.sleep(0.7)
    assert served.nodes() == []


def test_a_beat_whose_facts_cannot_be_read_is_one_that_failed(served: Roster) -> None:
    def unreadable() -> dict[str, Any]:
        raise NibbleError(ExitCode.NO_HARDWARE, what="the driver does not answer")

    one = member()
    one.facts = unreadable
    one.beat()
    assert "the driver does not answer" in str(one.error)
    assert served.nodes() == []


def test_a_wrong_token_is_one_line_and_exit_9(served: Roster) -> None:
    one = member("wrong")
    one.beat()
    with pytest.raises(NibbleError, match="refused this node's token") as caught:
        refuse(one)
    assert caught.value.code == ExitCode.CLUSTER
    assert served.nodes() == []


def test_a_taken_rank_is_one_line_and_exit_9(served: Roster) -> None:
    member().beat()
    second = member(address="127.0.0.3")
    second.beat()
    with pytest.raises(NibbleError, match=r"127\.0\.0\.2 has rank 1"):
        refuse(second)


def test_a_node_that_is_no_head_is_one_line_and_exit_9(
    served: Roster, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = member()
    monkeypatch.setattr(
        "nibble.cluster.member.call", lambda *given, **more: call("127.0.0.1", "/no", TOKEN)
    )
    one.beat()
    with pytest.raises(NibbleError, match=r"127\.0\.0\.1 is not a head.*correct HEAD_IP"):
        refuse(one)


def test_a_head_that_was_started_anew_is_another_head(served: Roster) -> None:
    one = member()
    one.beat()
    assert lost_head(one) is None
    served.session = "other"
    one.beat()
    assert "restarted" in (lost_head(one) or "")


@pytest.mark.parametrize("given", [None, "Bearer wrong", "Basic 0123456789abcdef", TOKEN])
@pytest.mark.parametrize("path", ["/nodes", "/beat", "/allreduce", "/nothing"])
def test_nothing_answers_without_the_token(served: Roster, path: str, given: str | None) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", agent_module.AGENT_PORT, timeout=5)
    connection.request("POST", path, b"{}", {"Authorization": given} if given else {})
    assert connection.getresponse().status == 401
    connection.close()


@pytest.mark.parametrize(
    "body", ['{"address": "x"}', "[]", "5", "{", '{"address": 5, "time": null}']
)
def test_a_body_that_is_no_object_of_ours_is_400(served: Roster, body: str) -> None:
    assert post(body) == 400


def test_a_body_of_no_length_or_too_long_is_not_read(served: Roster) -> None:
    assert post("{}", **{"Content-Length": "-1"}) == 413
    assert post("{}", **{"Content-Length": str(1 << 30)}) == 413


def post(body: str, **headers: str) -> int:
    """The status of a beat."""
    connection = http.client.HTTPConnection("127.0.0.1", agent_module.AGENT_PORT, timeout=5)
    connection.request("POST", "/beat", body, {"Authorization": f"Bearer {TOKEN}", **headers})
    try:
        return connection.getresponse().status
    finally:
        connection.close()


def test_what_fails_on_the_other_machine_is_said(served: Roster) -> None:
    with pytest.raises(AgentError, match="Permission denied: '/sys/class/net'") as caught:
        call("127.0.0.1", "/broken", TOKEN)
    assert caught.value.status == 500


def test_a_peer_that_is_gone_without_a_word_breaks_the_longest_call(served: Roster) -> None:
    connection = connect("127.0.0.1", 3600.0, {})
    assert connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    idle, interval, count = (
        connection.sock.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    assert idle + interval * count <= 30
    connection.close()


def test_a_second_agent_on_an_address_is_exit_9(served: Roster) -> None:
    with pytest.raises(NibbleError, match="cannot be opened") as caught:
        Agent("127.0.0.1", TOKEN, {})
    assert caught.value.code == ExitCode.CLUSTER


def test_a_ray_worker_of_the_head_before_this_one_is_told_so_and_not_counted(
    roster: Roster,
) -> None:
    """A check right after a head's restart would run its all-reduce with a node that is about to
    end.
    """
    old = message(role="ray-worker", rank=None, head="the one before")
    assert roster.beat(old)["session"] == "head"
    assert roster.nodes() == []
    roster.beat(old | {"head": "", "session": "b"})
    assert [node["address"] for node in roster.nodes()] == ["10.0.0.2"]
    roster.beat(old | {"head": "head", "session": "b"})
    assert len(roster.nodes()) == 1


def test_a_process_that_ended_on_a_node_is_told_with_its_age(roster: Roster, clock: Clock) -> None:
    end = {"run": 3, "pid": 7, "why": "VLLM::Worker_TP1 (pid 7) ended by itself", "ago_s": 0.5}
    roster.beat(message(ended=[end]))
    clock.now += 2
    nodes = roster.nodes()
    assert nodes[0]["ended"][0]["ago_s"] == pytest.approx(2.5)
    assert lost_node(nodes, nodes) is None
    assert ended_process(nodes, lambda node, end: end["run"] == 4) is None
    why = ended_process(nodes, lambda node, end: end["run"] == 3)
    assert why == "node 10.0.0.2 (rank 1): VLLM::Worker_TP1 (pid 7) ended by itself"


def test_of_several_processes_the_one_that_ended_first_is_named_once_all_had_the_time_to_tell(
    roster: Roster, clock: Clock
) -> None:
    def end(why: str, ago_s: float) -> dict[str, Any]:
        return {"run": 1, "pid": 7, "why": why, "ago_s": ago_s}

    roster.beat(message("10.0.0.1", rank=0, ended=[end("a consequence", 0.1)]))
    assert ended_process(roster.nodes(), lambda node, end: True) is None
    clock.now += 0.2
    roster.beat(message("10.0.0.2", rank=1, ended=[end("the cause", 0.4)]))
    clock.now += 0.2
    assert (
        ended_process(roster.nodes(), lambda node, end: True) == "node 10.0.0.2 (rank 1): the cause"
    )


def test_an_end_that_may_follow_from_a_silent_node_is_not_named_before_that_node_is_heard_or_lost(
    roster: Roster, clock: Clock
) -> None:
    """A container that is killed tells nothing; the workers that were connected to its own end,
    and their nodes tell that.
    """
    gone, idle = message("10.0.0.3", rank=2, busy=1), message("10.0.0.4", rank=None)
    roster.beat(gone)
    before = roster.nodes()
    roster.beat(idle)
    clock.now += 1.5
    end = {"run": 1, "pid": 7, "why": "Connection reset by peer", "ago_s": 0.6}
    roster.beat(message("10.0.0.2", rank=1, ended=[end]))
    assert ended_process(roster.nodes(), lambda node, end: True) is None
    clock.now += LOST_S - 1.5
    assert lost_node(before, roster.nodes()) == "node 10.0.0.3 (rank 2) has not answered for 10 s"
    roster.beat(gone)
    why = ended_process(roster.nodes(), lambda node, end: True)
    assert why == "node 10.0.0.2 (rank 1): Connection reset by peer"


def test_a_head_knows_how_long_the_slowest_of_its_servers_takes_to_stop(
    roster: Roster, clock: Clock
) -> None:
    nodes = head_handlers(roster)["/nodes"]
    assert roster.servers_stop_within_s() == 0
    nodes({"server": "a", "stops_within_s": 60})
    nodes({"server": "b", "stops_within_s": 90})
    nodes({})
    assert roster.servers_stop_within_s() == 90
    head_handlers(roster)["/ended"]({"server": "b"})
    assert roster.servers_stop_within_s() == 60
    clock.now += SERVER_S
    assert roster.servers_stop_within_s() == 0


def test_an_end_is_told_at_once_and_not_with_the_next_beat(
    roster: Roster, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: list[float] = []
    member = Member("10.0.0.1", TOKEN, "10.0.0.2", "serve", 1, 0, {}, dict)
    monkeypatch.setattr(member, "beat", lambda: beats.append(time.monotonic()))
    monkeypatch.setattr("nibble.cluster.member.BEAT_S", 30.0)
    member.start()
    deadline = time.monotonic() + 5
    while len(beats) < 2 and time.monotonic() < deadline:
        if beats and not member.ended:
            member.tell_end(End(1, 7, "it ended", time.monotonic()))
        time.sleep(0.02)
    member.close()
    assert len(beats) == 2

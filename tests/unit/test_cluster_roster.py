"""Who is there, who is lost, and what the token opens."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nibble.cluster import agent as agent_module
from nibble.cluster.agent import Agent, AgentError, call
from nibble.cluster.head import head_handlers, lost_head, refuse
from nibble.cluster.member import Member
from nibble.cluster.roster import LOST_S, Refused, Roster, lost_node
from nibble.errors import ExitCode, NibbleError

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
    with pytest.raises(Refused, match=r"rank 1 is taken by 10\.0\.0\.2"):
        roster.beat(message("10.0.0.3"))
    clock.now += LOST_S
    roster.beat(message("10.0.0.3"))


@pytest.mark.parametrize(
    ("then", "words"),
    [
        ("silent", r"10\.0\.0\.2 \(rank 1\) has given no sign of life for 10 s"),
        ("anew", "was started anew"),
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


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Roster]:
    """A real agent on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setattr(agent_module, "AGENT_PORT", probe.getsockname()[1])
    roster = Roster("head")
    agent = Agent("127.0.0.1", TOKEN, head_handlers(roster)).start()
    yield roster
    agent.close()


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
    with pytest.raises(NibbleError, match=r"rank 1 is taken by 127\.0\.0\.2"):
        refuse(second)


def test_a_head_that_was_started_anew_is_another_head(served: Roster) -> None:
    one = member()
    one.beat()
    assert lost_head(one) is None
    served.session = "other"
    one.beat()
    assert "started anew" in (lost_head(one) or "")


@pytest.mark.parametrize("given", [None, "Bearer wrong", "Basic 0123456789abcdef", TOKEN])
@pytest.mark.parametrize("path", ["/nodes", "/beat", "/allreduce", "/nothing"])
def test_nothing_answers_without_the_token(served: Roster, path: str, given: str | None) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", agent_module.AGENT_PORT, timeout=5)
    connection.request("POST", path, b"{}", {"Authorization": given} if given else {})
    assert connection.getresponse().status == 401
    connection.close()


def test_a_body_that_is_no_object_of_ours_is_400(served: Roster) -> None:
    with pytest.raises(AgentError) as caught:
        call("127.0.0.1", "/beat", TOKEN, {"address": "x"})
    assert caught.value.status == 400


def test_a_second_agent_on_an_address_is_exit_9(served: Roster) -> None:
    with pytest.raises(NibbleError, match="cannot be opened") as caught:
        Agent("127.0.0.1", TOKEN, {})
    assert caught.value.code == ExitCode.CLUSTER

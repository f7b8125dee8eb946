"""A rank without an API: its part of vLLM runs while rank 0's does, and the exit code says how it ended."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from nibble import engine as engine_module
from nibble.cluster import agent as agent_module
from nibble.cluster import member as member_module
from nibble.cluster.agent import Agent
from nibble.cluster.head import head_handlers
from nibble.cluster.headless import _Headless
from nibble.cluster.member import Member
from nibble.cluster.roster import Roster
from nibble.engine import Event
from nibble.errors import ExitCode, NibbleError
from nibble.prepare import plan_for, read_wishes

HERE, TOKEN = "127.0.0.1", "0123456789abcdef"
RANK_1 = {
    "NIBBLE_NNODES": "2",
    "NIBBLE_NODE_RANK": "1",
    "HEAD_IP": HERE,
    "TENSOR_PARALLEL_SIZE": "2",
    "NIBBLE_CLUSTER_WAIT_SECONDS": "1",
}


class Rank:
    """Rank 1 in a thread, with a head that the test moves; its vLLM is a program that sleeps."""

    def __init__(self) -> None:
        self.roster = Roster("head")
        self.agent = Agent(HERE, TOKEN, head_handlers(self.roster)).start()
        self.said: list[str] = []
        self.ended: list[int | NibbleError] = []
        plan = plan_for(read_wishes(["nibble-demo"], RANK_1))
        self.member = Member(HERE, TOKEN, "127.0.0.2", "serve", 1, 0, {}, lambda: {"vllm": "x"})
        self.member.beat()
        self.member.start()
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.node = _Headless(plan, self.member, dict, events, self.said.append)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.ended.append(self.node.run())
        except NibbleError as error:
            self.ended.append(error)

    def move(self, state: str, run: int) -> None:
        """What the head says from now on."""
        self.roster.state, self.roster.run = state, run

    def is_running(self) -> bool:
        return self.node.status()["engine_pid"] is not None

    def end(self) -> int | NibbleError:
        self.thread.join(10)
        return self.ended[0]


def wait(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        monkeypatch.setattr(agent_module, "AGENT_PORT", probe.getsockname()[1])
    monkeypatch.setattr(member_module, "BEAT_S", 0.05)
    monkeypatch.setattr(member_module, "LOST_S", 0.5)
    monkeypatch.setattr(engine_module, "child_command", lambda argv: ["sleep", "60"])
    found = Rank()
    yield found
    found.member.close()
    found.node.kill()


def test_its_part_runs_while_the_heads_does(rank: Rank) -> None:
    rank.move("starting", 1)
    wait(rank.is_running)
    assert not rank.node.is_ready()
    rank.move("ready", 1)
    wait(rank.node.is_ready)
    rank.move("waiting", 1)
    wait(lambda: not rank.is_running())
    rank.move("starting", 2)
    wait(rank.is_running)
    rank.move("stopped", 2)
    assert rank.end() == ExitCode.OK


def test_a_head_that_stays_away_is_exit_10(rank: Rank) -> None:
    rank.move("ready", 1)
    wait(rank.node.is_ready)
    rank.agent.close()
    wait(lambda: not rank.is_running())
    error = rank.end()
    assert isinstance(error, NibbleError)
    assert (error.code, "no answer from the head" in error.what) == (ExitCode.ENGINE_DIED, True)


def test_a_head_that_begins_nothing_is_exit_9(rank: Rank) -> None:
    error = rank.end()
    assert isinstance(error, NibbleError)
    assert (error.code, "began nothing within 1 s" in error.what) == (ExitCode.CLUSTER, True)

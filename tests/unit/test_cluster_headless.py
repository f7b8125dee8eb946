"""A rank without an API: its part of vLLM runs while rank 0's does, and the exit code says how
it ended.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nibble.cli.show_plan import _watchdog
from nibble.cluster import agent as agent_module
from nibble.cluster import headless as headless_module
from nibble.cluster import member as member_module
from nibble.cluster.agent import Agent, AgentError, call
from nibble.cluster.head import head_handlers
from nibble.cluster.headless import _Headless, serve_headless
from nibble.cluster.member import Member
from nibble.cluster.node import proof_handlers, ranks_by_pid
from nibble.cluster.roster import Roster
from nibble.engine import process as engine_module
from nibble.engine.process import Ended, Event, Stop
from nibble.errors import ExitCode, NibbleError
from nibble.machine.memory import MemorySource
from nibble.plan.gather import plan_for, read_wishes
from tests.support.memory_files import machine
from tests.support.servers.serving import free_port

HERE, TOKEN = "127.0.0.1", "0123456789abcdef"
RANK_1 = {
    "NIBBLE_NNODES": "2",
    "NIBBLE_NODE_RANK": "1",
    "HEAD_IP": HERE,
    "TENSOR_PARALLEL_SIZE": "2",
    "NIBBLE_CLUSTER_WAIT_SECONDS": "3",
    "NIBBLE_MEMORY_RESERVE_GIB": "1",
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


def wait(what: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """The machine's files of memory; the watchdog stops below 256 MiB."""
    return machine(tmp_path, available_mib=8000)


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a free port."""
    monkeypatch.setattr(agent_module, "AGENT_PORT", free_port(HERE))


@pytest.fixture
def rank(agents: None, memory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    monkeypatch.setattr(headless_module, "MemorySource", lambda: MemorySource(memory))
    monkeypatch.setattr(member_module, "BEAT_S", 0.05)
    monkeypatch.setattr(member_module, "LOST_S", 1.5)
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
    assert (error.code, "started no run within 3 s" in error.what) == (ExitCode.CLUSTER, True)


def test_what_ended_first_here_is_told_here_and_by_the_error(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM says no word where its engine process was killed while it started (data parallel,
    headless).
    """
    behave = """
import subprocess, time
time.sleep(0.3)
worker = subprocess.Popen(["VLLM::EngineCore", "300"], executable="/bin/sleep")
time.sleep(2.5)
worker.kill()
worker.wait()
time.sleep(0.5)
"""
    monkeypatch.setattr(engine_module, "child_command", lambda argv: [sys.executable, "-c", behave])
    monkeypatch.setattr(headless_module, "NEW_RUN_S", 0.5)
    rank.move("ready", 1)
    error = rank.end()
    assert isinstance(error, NibbleError)
    assert error.code == ExitCode.ENGINE_DIED
    told = (
        r"vLLM ended by itself in phase headless \(exit code 0\); VLLM::EngineCore \(pid \d+\)"
        r" ended first"
    )
    assert re.fullmatch(told, error.what)
    assert f"{error.what}; waiting for the head's decision" in rank.said


def test_the_head_hears_at_once_which_process_ended_here(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM itself may take seconds to end after it, and rank 0's may not notice for half a
    minute.
    """
    behave = """
import subprocess, time
worker = subprocess.Popen(["VLLM::Worker_TP1", "300"], executable="/bin/sleep")
time.sleep(3)
worker.kill()
code = worker.wait()
print(f"(MainProcess pid=7) ERROR 11-23 07:47:37 [multiproc_executor.py:315] Worker proc VllmWorker-1 died unexpectedly"
      f" (exit code: {code}), shutting down executor.", flush=True)
time.sleep(60)
"""  # noqa: E501
    monkeypatch.setattr(engine_module, "child_command", lambda argv: [sys.executable, "-c", behave])
    monkeypatch.setattr(member_module, "LOST_S", 30.0)
    rank.move("ready", 4)
    wait(lambda: any(node["ended"] for node in rank.roster.nodes()), 30)
    (end,) = rank.roster.nodes()[0]["ended"]
    assert end["ago_s"] < 2
    assert (
        end["run"],
        bool(re.match(r"VLLM::Worker_TP1 \(pid \d+\) was killed by SIGKILL$", end["why"])),
    ) == (
        4,
        True,
    )
    assert rank.is_running()
    rank.move("waiting", 4)
    wait(lambda: not any(node["ended"] for node in rank.roster.nodes()), 30)


def test_a_server_that_is_stopped_between_two_runs_ends_this_rank_with_0(rank: Rank) -> None:
    rank.move("ready", 1)
    wait(rank.is_running)
    rank.move("waiting", 1)
    wait(lambda: not rank.is_running())
    rank.move("stopped", 1)
    began = time.monotonic()
    assert rank.end() == ExitCode.OK
    assert time.monotonic() - began < 1  # it would wait so long for the next run


def test_a_signal_that_comes_as_a_run_begins_is_not_lost(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(text: str) -> None:
        if text.startswith("run 1"):
            rank.node._events.put(Ended(1))  # of an earlier run
            rank.node._events.put(Stop(signal.SIGTERM))

    monkeypatch.setattr(rank.node, "_say", say)
    rank.move("starting", 1)
    assert rank.end() == ExitCode.OK


def test_memory_that_runs_out_on_its_machine_ends_it_with_7(rank: Rank, memory: Path) -> None:
    rank.move("ready", 1)
    wait(lambda: (rank.node.status()["memory"] or {}).get("available_bytes") == 8000 << 20)
    machine(memory, available_mib=400)
    time.sleep(0.5)
    assert rank.is_running()  # admission is rank 0's
    machine(memory, available_mib=200)
    error = rank.end()
    assert isinstance(error, NibbleError)
    assert error.code == ExitCode.NO_FIT
    assert error.what.startswith(
        "stopped the engine in phase headless: 0.195 GiB of memory are available"
    )


def test_its_plan_shows_the_watchdog_that_it_has() -> None:
    own, head = (
        plan_for(read_wishes(["nibble-demo"], RANK_1 | {"NIBBLE_NODE_RANK": rank})) for rank in "10"
    )
    assert _watchdog(own) == "host memory below 0.250 GiB: nibble stops this rank"
    assert "no new requests until" in _watchdog(head)


def test_between_two_runs_nothing_is_stopped_for_memory(rank: Rank, memory: Path) -> None:
    machine(memory, available_mib=200)
    error = rank.end()
    assert isinstance(error, NibbleError)
    assert error.code == ExitCode.CLUSTER  # the head began nothing


def test_reports_are_those_of_the_workers_that_still_run(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    for rank, pid in enumerate((os.getpid(), gone.pid)):
        (tmp_path / f"worker-{pid}.json").write_text(json.dumps({"rank": rank}))
    told = proof_handlers(tmp_path)["/proof"]({})
    assert told == {"reports": [{"rank": 0}], "ranks": {os.getpid(): 0}}
    assert ranks_by_pid(tmp_path) == {os.getpid(): 0, gone.pid: 1}


def test_its_workers_reports_reach_whoever_has_the_token_and_the_head_hears_why_it_ends(
    agents: None, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headless_module, "MemorySource", lambda: MemorySource(memory))
    report = 'echo "{\\"rank\\": 1}" > $NIBBLE_PROOF/worker-$$.json; sleep 60'
    monkeypatch.setattr(engine_module, "child_command", lambda argv: ["sh", "-c", report])
    roster = Roster("head")
    roster.state, roster.run = "ready", 1
    found: list[object] = []

    def ask() -> None:
        for _ in range(100):
            try:
                if reports := call("127.0.0.2", "/proof", TOKEN)["reports"]:
                    found.extend(reports)
                    break
            except AgentError:
                pass
            time.sleep(0.1)
        machine(memory, available_mib=200)

    place = {"WORKER_IP": "127.0.0.2", "NIBBLE_CONTROL_PORT": str(free_port())}
    environ = RANK_1 | place | {"NIBBLE_CLUSTER_TOKEN": TOKEN}
    agent = Agent(HERE, TOKEN, head_handlers(roster)).start()
    try:
        threading.Thread(target=ask, daemon=True).start()
        plan = plan_for(read_wishes(["nibble-demo"], environ))
        with pytest.raises(NibbleError, match="stopped the engine in phase headless"):
            serve_headless(plan, environ, lambda text: None)
    finally:
        agent.close()
    assert found == [{"rank": 1}]
    assert "stopped the engine in phase headless" in roster.left["127.0.0.2"]

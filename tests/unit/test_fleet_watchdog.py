"""Short memory with several models: one watchdog pauses the port and ends one engine at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nibble.machine.memory import MemorySource
from nibble.plan.memory import limits
from nibble.serve import watchdog
from nibble.serve.fleet import fleet as fleet_module
from nibble.serve.fleet import memory_watch
from nibble.serve.fleet.choose import Loaded, to_end
from nibble.serve.fleet.memory_watch import MemoryWatch
from nibble.serve.fleet.report import Report
from tests.support.memory_files import machine
from tests.unit.test_fleet_routing import Running, start, without_signals  # noqa: F401 - fixtures

RESERVE = limits(4000 << 20)  # pause below 2000 MiB, stop below 1000, resume from 3000


class Watched:
    """Two models under one watchdog, which reads the files of `root`."""

    def __init__(self, running: Running, root: Path) -> None:
        self.running, self.root = running, root
        fleet, admission = running.fleet, running.admission
        self.watch = MemoryWatch(fleet.members, RESERVE, admission, lambda: MemorySource(root))
        fleet._is_short = lambda: self.watch.is_short
        self.report = Report(fleet, "http://127.0.0.1", self.watch.to_json, admission)
        self.thread = threading.Thread(target=self.watch.run, daemon=True)
        self.thread.start()

    def set_available(self, mib: int) -> None:
        machine(self.root, available_mib=mib)

    def states(self) -> dict[str, str]:
        return {one.entry.model: one.entry.state for one in self.running.fleet.members}


@pytest.fixture
def watched(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start,  # noqa: F811 - see the import
) -> Iterator[Watched]:
    monkeypatch.setattr(watchdog, "INTERVAL_S", 0.01)
    monkeypatch.setattr(watchdog, "RESUME_AFTER_S", 0.1)
    monkeypatch.setattr(memory_watch, "SETTLE_S", 1.0)
    monkeypatch.setattr(fleet_module, "MEMORY_PAUSE_S", 0.5)
    root = machine(tmp_path / "machine", available_mib=8000)
    running = start(sizes={"a": 4, "b": 4}, allowed=10)
    found = Watched(running, root)
    running.wait_for(lambda: set(found.states().values()) == {"ready"})
    yield found
    found.watch.close()
    found.thread.join(5)


def test_short_memory_pauses_every_model_until_it_is_back(watched: Watched) -> None:
    running = watched.running
    watched.set_available(1500)
    running.wait_for(lambda: running.ask("a")[0] == 503)
    status, answer = running.ask("b")
    assert status == 503 and "memory is short: 1.5 GiB" in answer["error"]["message"]
    assert not watched.report.is_ready() and "memory is short" in watched.report.why()
    found = watched.report.status()
    assert found["state"] == "paused" and found["memory"]["action"] == "pause"
    families = {one.name: one for one in text_string_to_metric_families(watched.report.metrics())}
    assert families["nibble_watchdog_paused"].samples[0].value == 1
    (problem,) = watched.report.live()["problems"]
    assert problem["level"] == "red" and "memory is short" in problem["what"]
    assert watched.states() == {"a": "ready", "b": "ready"}
    watched.set_available(8000)
    running.wait_for(lambda: running.ask("a")[0] == 200)
    assert len(running.engines) == 2
    assert [line.split(":")[0] for line in watched.watch.news()] == [
        "new requests get 503",
        "new requests are admitted again",
    ]


def test_one_engine_ends_and_the_other_serves_on(watched: Watched) -> None:
    running = watched.running
    assert running.ask("a")[0] == 200  # b is the least used
    watched.set_available(900)
    running.wait_for(lambda: running.running("b").code is not None)
    watched.set_available(8000)
    running.wait_for(lambda: running.ask("a")[0] == 200)
    assert running.running("a").code is None and len(running.engines) == 2
    status, answer = running.ask("b")
    assert status == 503 and "nibble ended it because memory ran out" in answer["error"]["message"]
    running.wait_for(lambda: watched.states()["b"] == "ready")  # after the pause
    assert running.ask("b")[0] == 200


def test_the_next_one_ends_where_the_first_was_not_enough(watched: Watched) -> None:
    watched.set_available(900)
    engines = watched.running.engines
    watched.running.wait_for(lambda: all(one.code is not None for one in engines))
    watched.running.wait_for(lambda: set(watched.states().values()) <= {"holding", "unloaded"})
    assert len(engines) == 2  # nothing loads while memory is short


def test_the_engine_that_ends_is_the_one_that_is_missed_least() -> None:
    def one(name: str, running: int = 0, used_s: float = 0, **more: bool) -> Loaded:
        return Loaded(name, 1, running, used_s, more.get("stays", False), more.get("ready", True))

    assert to_end([]) is None
    assert to_end([one("old", used_s=1), one("new", used_s=2)]) == "old"
    assert to_end([one("busy", 1, 0), one("idle", 0, 9)]) == "idle"
    assert to_end([one("kept", stays=True), one("busy", 1, 9)]) == "busy"
    assert to_end([one("old"), one("loads", 0, 9, ready=False)]) == "loads"

"""The memory watchdog's decisions, and its thread on files that change."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nibble.machine.memory import Memory, MemorySource
from nibble.plan.memory import UNWATCHED, limits
from nibble.serve import watchdog as governor
from nibble.serve.watchdog import Governor, decide
from tests.support.memory_files import machine

GIB = 1 << 30
SPARK = limits(8 * GIB)  # pause below 4, stop below 2, resume from 6


@pytest.mark.parametrize(
    ("available_gib", "stalled", "is_paused", "action"),
    [
        (9, None, False, "serve"),
        (5, None, False, "serve"),
        (3.9, None, False, "pause"),
        (5.9, None, True, "pause"),
        (6, None, True, "serve"),
        (1.9, None, False, "stop"),
        (1.9, None, True, "stop"),
        (7.9, 10.0, False, "pause"),
        (7.9, 50.0, False, "stop"),
        (20, 90.0, False, "serve"),
        (7.9, 9.0, False, "serve"),
    ],
)
def test_admission_stops_before_the_engine_does(
    available_gib: float, stalled: float | None, is_paused: bool, action: str
) -> None:
    memory = Memory(121 * GIB, int(available_gib * GIB), "MemAvailable", stalled)
    assert decide(memory, SPARK, is_paused)[0] == action


def test_the_reason_has_the_number_and_where_it_is_from() -> None:
    why = decide(Memory(10 * GIB, 3 * GIB, "cgroup /x", 60.0), SPARK, False)[1]
    assert (
        why
        == "3.0 GiB of memory are available (cgroup /x) and all tasks waited for memory 60 % of the"
        " last 10 s"
    )


def test_a_reserve_of_0_watches_nothing() -> None:
    assert decide(Memory(GIB, 0, "MemAvailable", 100.0), UNWATCHED, False)[0] == "serve"


def test_a_kill_by_the_kernel_is_news_for_a_while_and_no_reason_for_a_later_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(tmp_path)
    found = Governor(MemorySource(root), UNWATCHED, lambda action, why: None)
    assert not found.kernel_has_killed()  # those of before do not count
    (root / "proc/vmstat").write_text("oom_kill 4\n")
    assert found.kernel_has_killed()
    monkeypatch.setattr(governor, "KILL_IS_NEWS_S", 0.0)
    assert not found.kernel_has_killed()


class TestThread:
    @pytest.fixture
    def told(self) -> list[str]:
        return []

    @pytest.fixture
    def watched(
        self, tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Path]:
        monkeypatch.setattr(governor, "INTERVAL_S", 0.01)
        monkeypatch.setattr(governor, "RESUME_AFTER_S", 1.0)  # ten times what the test sleeps
        root = machine(tmp_path, available_mib=8000)
        found = Governor(
            MemorySource(root), limits(4000 << 20), lambda action, why: told.append(action)
        )
        thread = threading.Thread(target=found.run, daemon=True)
        thread.start()
        yield root
        found.close()
        thread.join(5)
        assert not thread.is_alive()

    def test_it_pauses_resumes_after_a_while_and_stops(
        self, watched: Path, told: list[str]
    ) -> None:
        time.sleep(0.1)
        assert told == []
        machine(watched, available_mib=1500)
        self.wait_for(told, "pause")
        machine(watched, available_mib=3500)
        time.sleep(0.1)
        assert "serve" not in told  # not before RESUME_AFTER_S
        self.wait_for(told, "serve")
        machine(watched, available_mib=900)
        self.wait_for(told, "stop")
        time.sleep(0.1)
        assert told.count("stop") == told.count("serve") == 1

    def test_it_lives_on_where_memory_cannot_be_read_for_a_while(
        self, watched: Path, told: list[str]
    ) -> None:
        (watched / "proc/meminfo").write_text("")
        time.sleep(0.2)
        machine(watched, available_mib=900)
        self.wait_for(told, "stop")

    def wait_for(self, told: list[str], action: str) -> None:
        deadline = time.monotonic() + 5
        while action not in told:
            assert time.monotonic() < deadline, told
            time.sleep(0.01)

"""Which processes belong to a server, by psutil."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from nibble.machine import process_table
from nibble.machine.process_table import (
    Doomed,
    Process,
    activity,
    engine_title,
    family,
    kill_until_gone,
    own_titles,
    processes,
)
from nibble.machine.processes import ends, major_faults, started_ticks

NEVER = -1  # no session has this number


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A child in a separate session, whose name and title are hard to read."""
    program = tmp_path / "a) Z 1 (b"
    shutil.copy(shutil.which("sleep") or "", program)
    process = subprocess.Popen(["VLLM::Odd", "60"], executable=program, start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_a_member_is_found_by_descent_and_by_session(odd: subprocess.Popen[bytes]) -> None:
    for session in (NEVER, odd.pid):
        (found,) = [one for one in family(session) if one.pid == odd.pid]
        assert (found.name, found.parent, found.session) == ("a) Z 1 (b", os.getpid(), odd.pid)
        assert found.state != psutil.STATUS_ZOMBIE
    assert engine_title(odd.pid) == "VLLM::Odd"
    assert started_ticks(odd.pid).isdigit() and major_faults(odd.pid) >= 0
    assert activity(odd.pid).cpu_seconds >= 0


def test_an_ended_child_is_none(odd: subprocess.Popen[bytes]) -> None:
    odd.kill()
    os.waitid(os.P_PID, odd.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert odd.pid not in {one.pid for one in [*family(odd.pid), *processes()]}
    odd.wait()
    assert engine_title(odd.pid) is None
    assert (started_ticks(odd.pid), major_faults(odd.pid)) == ("", 0)


def test_descendants_are_found_where_other_users_processes_may_not_be_read(
    odd: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        raise psutil.AccessDenied(1)  # as psutil does with hidepid=1

    monkeypatch.setattr(psutil.Process, "children", refused)
    assert odd.pid in {one.pid for one in family(NEVER)}
    assert 1 not in {one.pid for one in family(NEVER)}


def test_a_forked_child_does_not_count_until_it_has_a_title_of_its_own() -> None:
    engine = Process(2, "EngineCore", 1, 1, "sleeping", 0.0)
    fork, worker = replace(engine, pid=3, parent=2), replace(engine, pid=4, parent=2)
    titles = {1: None, 2: "VLLM::EngineCore", 3: "VLLM::EngineCore", 4: "VLLM::Worker"}
    server = replace(engine, pid=1, parent=0)
    found = own_titles([server, engine, fork, worker], lambda one: titles[one.pid])
    assert found == {2: "VLLM::EngineCore", 4: "VLLM::Worker"}


def test_a_process_that_ends_while_the_end_of_another_is_handled_is_not_missed() -> None:
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    over = threading.Event()
    found = ends(lambda: {one.pid: str(one.pid) for one in children if one.poll() is None}, over)
    watch = threading.Timer(0.3, children[0].kill)
    watch.start()
    try:
        assert next(found) == str(children[0].pid)
        children[1].kill()
        children[1].wait()  # nothing finds it any more
        assert next(found) == str(children[1].pid)
        over.set()
        assert list(found) == []
    finally:
        watch.cancel()
        for child in children:
            child.kill()
            child.wait()


# --- ends by force ---

TRACKER = "import sys; from multiprocessing.resource_tracker import main; sys.stdin.read()"


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a Python program and waits until it runs."""
    started: list[subprocess.Popen[bytes]] = []

    def start(program: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", f"print(flush=True); {program}"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


Start = Callable[..., subprocess.Popen[bytes]]


def test_a_tracker_has_its_time_from_the_end_of_the_others_on(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process that held much pinned memory takes seconds to end."""
    monkeypatch.setattr(process_table, "_TRACKER_S", 1.0)
    holder, tracker = start("import time; time.sleep(60)"), start(TRACKER)
    chosen = {holder.pid, tracker.pid}
    seen_alone: list[float] = []
    since = time.monotonic()

    def find() -> list[Process]:
        """The holder stays listed for 1.5 s, as one in uninterruptible sleep does."""
        left = [one for one in processes() if one.pid in chosen]
        if time.monotonic() - since < 1.5:
            return [*left, replace(left[0], pid=holder.pid)] if left else []
        seen_alone.append(time.monotonic())
        if len(seen_alone) == 2 and tracker.stdin is not None:
            tracker.stdin.close()  # its pipe ends with the holder
        return left

    killed = kill_until_gone(find)
    assert killed == [holder.pid]
    assert tracker.wait(5) == 0


def test_a_tracker_that_does_not_end_is_killed_too(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_table, "_TRACKER_S", 0.2)
    tracker = start(TRACKER)
    find = lambda: [one for one in processes() if one.pid == tracker.pid]  # noqa: E731
    assert kill_until_gone(find) == [tracker.pid]
    assert tracker.wait(5) == -signal.SIGKILL


def test_a_process_that_cannot_be_killed_keeps_its_tracker(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_table, "_TRACKER_S", 0.1)
    tracker = start(TRACKER)
    stuck = next(one for one in processes() if one.pid == os.getpid())
    stuck = replace(stuck, pid=1 << 30)  # no such pid: it is listed whatever we send
    find = lambda: [stuck, *(one for one in processes() if one.pid == tracker.pid)]  # noqa: E731
    assert kill_until_gone(find, timeout_s=0.3) == []
    assert tracker.poll() is None


def test_the_watchdog_kills_what_it_saw_twice_and_no_tracker(start: Start) -> None:
    """Forked and not yet executed, a tracker looks like its parent."""
    api, worker, tracker, new = (start("import sys; sys.stdin.read()") for _ in range(4))
    table = {one.pid: one for one in processes()}
    doomed = Doomed(api.pid)
    doomed.look([table[api.pid], table[worker.pid], table[tracker.pid]])
    assert api.pid in doomed and worker.pid not in doomed
    real_tracker = start(TRACKER)
    doomed._seen.add(real_tracker.pid)  # seen as its parent, before it executed its program
    table = {one.pid: one for one in processes()}
    doomed.look([table[one.pid] for one in (api, worker, new, real_tracker)])
    doomed.kill()
    assert [api.wait(5), worker.wait(5)] == [-signal.SIGKILL] * 2
    time.sleep(0.1)
    assert [one.poll() for one in (tracker, new, real_tracker)] == [None] * 3
    doomed.forget()
    assert api.pid not in doomed

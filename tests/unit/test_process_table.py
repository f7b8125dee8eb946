"""Which processes belong to a server, by psutil."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from nibble.machine.process_table import (
    Process,
    activity,
    engine_title,
    family,
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

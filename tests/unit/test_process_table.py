"""Which processes belong to a server, by psutil."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nibble.machine.process_table import activity, engine_title, family, processes
from nibble.machine.processes import major_faults, started_ticks

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

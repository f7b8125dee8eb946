"""Servers in the background as other users see them; test_detached_serve.py has them with a real
server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nibble.errors import ExitCode, NibbleError
from nibble.serve.background import Place, Record, registered, stop
from nibble.serve.port_lock import hold_port
from tests.support.other_users import open_to_others
from tests.support.paths import ROOT
from tests.support.servers.serving import free_port

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path / "cache", 8123)
    made.record.parent.mkdir(parents=True)
    made.log.open()
    open_to_others(made.record.parent)
    open_to_others(made.log.path.parent)
    return made


def as_another_user(what: str, place: Place, uid: int = 65534) -> tuple[int, str]:
    """Exit code and words of a program that calls `what` with the place `p`."""
    code = (
        "import os, sys; from pathlib import Path; from nibble.cli import app as cli\n"
        "from nibble.serve.background import Place, show_logs, stop\n"
        "from nibble.cli.failures import guarded; p = Place(Path(sys.argv[1]), 8123)\n"
        f"os.environ.pop('HOME', None); os.setgid({uid}); os.setuid({uid})\n"
        f"sys.exit(guarded(lambda: {what}))"
    )
    command = [sys.executable, "-c", code, place.cache]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
    )
    return done.returncode, done.stdout + done.stderr


def test_a_server_in_the_foreground_is_told_with_how_it_ends(tmp_path: Path) -> None:
    place = Place(tmp_path, free_port())
    assert stop(place) == (0, f"no server runs in the background on port {place.port}")
    with hold_port("127.0.0.1", place.port):
        code, said = stop(place)
    assert code == 0 and "foreground ends with Ctrl-C" in said


def test_a_running_server_of_another_user_is_not_called_ended(place: Place) -> None:
    with registered(place, "acme/m", 8124, 30):
        code, said = as_another_user("print(stop(p))", place)
    assert code == 5 and "belongs to another user" in said, said


@pytest.mark.parametrize("damage", [{"pid": "x"}, {"process": "1"}, {"process": None}])
def test_a_damaged_record_of_a_running_server_is_one_error(
    place: Place, damage: dict[str, object]
) -> None:
    with registered(place, "acme/m", 8124, 30):
        found = json.loads(place.record.read_text())
        place.record.write_text(json.dumps(found | damage))
        with pytest.raises(NibbleError) as caught:
            stop(place)
    assert caught.value.code is ExitCode.CONFIG and "has no readable record" in caught.value.line()


def test_an_ended_server_of_another_user_is_told_and_its_record_stays(place: Place) -> None:
    place.write(Record(1, "another-boot host 1 1", 8123, 8124, 30, "acme/m", time.time()))
    code, said = as_another_user("print(stop(p)[1])", place)
    assert code == 0 and "ended without an exit code" in said, said
    assert place.record.exists()


def test_records_that_this_user_may_not_read_are_one_error(place: Place) -> None:
    with registered(place, "acme/m", 8124, 30):
        place.record.parent.chmod(0o700)
        code, said = as_another_user("print(stop(p))", place)
    assert code == 5 and "cannot be read (Permission denied)" in said, said


def test_a_log_that_this_user_may_not_read_is_one_error(place: Place) -> None:
    code, said = as_another_user("show_logs(p, 10, False)", place)
    assert code == 5 and f"{place.log.path} cannot be read (Permission denied)" in said, said


def test_a_user_without_a_home_is_told_so_and_a_fault_of_ours_is_still_one_line(
    place: Place,
) -> None:
    what = "__import__('nibble.machine.paths', fromlist=['home']).home(os.environ)"
    code, said = as_another_user(what, place, uid=54321)
    assert code == 5 and "uid 54321 has no home folder; expected HOME" in said, said
    code, said = as_another_user("1 // 0", place, uid=54321)
    assert code == 1 and said.count("\n") == 1 and "internal fault: ZeroDivisionError" in said, said

"""The log of a server in the background: rotated by the server itself, read over the files,
followed through rotations.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from pathlib import Path

from nibble.serve.log_file import KEPT, LogFile
from tests.support.paths import ROOT

# What a server does: its output is the file, which it rotates; a child keeps writing through it.
SERVER = """
import os, sys, time
from pathlib import Path
from nibble.serve.log_file import LogFile
log = LogFile(Path(sys.argv[1]), max_bytes=2000)
for number in range(int(sys.argv[2])):
    os.write(1, b"line %04d of the engine\\n" % number)
    if number % 10 == 9:
        log.rotate_output()
        time.sleep(float(sys.argv[3]))
"""


def write(path: Path, lines: int, pause_s: float = 0.0) -> subprocess.Popen[bytes]:
    with path.open("ab") as log:
        command = [sys.executable, "-c", SERVER, str(path), str(lines), str(pause_s)]
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)


def test_a_server_rotates_its_own_output_and_loses_no_line_that_is_kept(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "8000.log", max_bytes=2000)
    log.open()
    assert write(log.path, 1000).wait(30) == 0
    assert len(log.older()) == KEPT
    found, end = log.tail(200)
    assert found == [f"line {number:04d} of the engine" for number in range(800, 1000)]
    assert end == log.path.stat().st_size
    assert all(path.stat().st_size < 2300 for path in [*log.older(), log.path])
    assert log.path.stat().st_mode & 0o077 == 0


def test_following_goes_on_over_rotations_until_the_server_ends(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "8000.log", max_bytes=2000)
    log.open()
    log.path.write_text("old\n")
    last, end = log.tail(10)
    server = write(log.path, 300, 0.02)
    text = "".join(log.follow(end, lambda: server.poll() is not None))
    assert last == ["old"]
    assert text == "".join(f"line {number:04d} of the engine\n" for number in range(300))


def test_a_reader_that_is_late_misses_nothing_that_is_kept(tmp_path: Path) -> None:
    """Three files were filled since its last look."""
    log = LogFile(tmp_path / "8000.log", max_bytes=100)
    log.open()
    expected = ""
    with contextlib.closing(log.follow(0, lambda: True)) as followed:
        for number in range(4):
            text = f"{number}" * 120 + "\n"
            log.path.write_text(text)
            expected += text
            if number == 0:
                assert next(followed) == text
            assert log.rotate()
        log.open()
        assert "".join(followed) == expected.removeprefix("0" * 120 + "\n")


def test_a_start_begins_a_new_file_where_the_old_one_is_large(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "8000.log", max_bytes=10)
    log.open()
    log.path.write_text("more than ten bytes\n")
    log.open()
    assert log.path.read_text() == "" and log.tail(5)[0] == ["more than ten bytes"]


def test_following_ends_when_nothing_runs(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "8000.log")
    log.open()
    texts: list[str] = []
    over = threading.Event()
    reader = threading.Thread(target=lambda: texts.extend(log.follow(0, over.is_set)), daemon=True)
    reader.start()
    time.sleep(0.3)
    log.path.write_text("last words\n")
    over.set()
    reader.join(5)
    assert not reader.is_alive() and "".join(texts) == "last words\n"

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from nibble.engine.gate.state import FILE_BYTES, PHASE_BYTES, GateState


def test_new_state_file_is_private_fixed_size_and_starting(tmp_path: Path) -> None:
    path = tmp_path / "gate"
    GateState.create(path)
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == FILE_BYTES
    assert GateState.open(path).get() == ("starting", "")
    assert [entry.name for entry in tmp_path.iterdir()] == ["gate"]  # no scratch file left


def test_state_file_is_private_under_an_open_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        GateState.create(tmp_path / "gate")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "gate").stat().st_mode) == 0o600


@pytest.mark.parametrize("state", ["starting", "ready", "draining", "paused"])
def test_reader_sees_what_the_writer_set(tmp_path: Path, state) -> None:
    writer = GateState.create(tmp_path / "gate")
    reader = GateState.open(tmp_path / "gate")
    writer.set(state, "warm-up")
    assert reader.get() == (state, "warm-up")
    assert writer.get() == (state, "warm-up")


def test_shorter_phase_leaves_nothing_of_the_longer_one(tmp_path: Path) -> None:
    writer = GateState.create(tmp_path / "gate")
    writer.set("starting", "a rather long phase")
    writer.set("starting", "load")
    assert GateState.open(tmp_path / "gate").get() == ("starting", "load")


def test_too_long_phase_is_cut_between_characters(tmp_path: Path) -> None:
    writer = GateState.create(tmp_path / "gate")
    writer.set("starting", "ä" * 200)
    assert writer.get() == ("starting", "ä" * (PHASE_BYTES // 2))


def test_another_process_sees_the_change_through_its_open_mapping(tmp_path: Path) -> None:
    path = tmp_path / "gate"
    writer = GateState.create(path)
    program = (
        "import sys\nfrom nibble.engine.gate.state import GateState\nreader ="
        " GateState.open(sys.argv[1])\nfor _ in range(3):\n    print(*reader.get(), flush=True)\n  "
        "  sys.stdin.readline()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin
    assert child.stdout
    seen = [child.stdout.readline().split()]
    for change in (lambda: writer.set("ready", "ready"), lambda: writer.set("draining", "drain")):
        change()
        child.stdin.write("\n")
        child.stdin.flush()
        seen.append(child.stdout.readline().split())
    child.communicate("\n", timeout=10)
    assert seen == [["starting"], ["ready", "ready"], ["draining", "drain"]]


def test_missing_file_reads_as_starting_and_is_found_once_it_appears(tmp_path: Path) -> None:
    reader = GateState.open(tmp_path / "gate")
    assert reader.get() == ("starting", "")
    GateState.create(tmp_path / "gate").set("ready", "ready")
    assert reader.get() == ("ready", "ready")


@pytest.mark.parametrize("content", [b"", b"x", b"x" * FILE_BYTES, b"x" * 4096])
def test_file_that_is_no_gate_state_reads_as_starting(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "gate").write_bytes(content)
    assert GateState.open(tmp_path / "gate").get() == ("starting", "")


def test_unknown_state_byte_reads_as_starting(tmp_path: Path) -> None:
    path = tmp_path / "gate"
    GateState.create(path).set("ready", "ready")
    content = bytearray(path.read_bytes())
    content[8] = 77
    path.write_bytes(content)
    assert GateState.open(path).get() == ("starting", "ready")


def test_symlink_is_not_followed(tmp_path: Path) -> None:
    GateState.create(tmp_path / "real").set("ready", "ready")
    (tmp_path / "gate").symlink_to(tmp_path / "real")
    assert GateState.open(tmp_path / "gate").get() == ("starting", "")


def test_reader_cannot_write(tmp_path: Path) -> None:
    GateState.create(tmp_path / "gate")
    with pytest.raises(RuntimeError, match="not open for writing"):
        GateState.open(tmp_path / "gate").set("ready", "")


def test_creating_again_starts_from_starting(tmp_path: Path) -> None:
    GateState.create(tmp_path / "gate").set("ready", "ready")
    GateState.create(tmp_path / "gate")
    assert GateState.open(tmp_path / "gate").get() == ("starting", "")

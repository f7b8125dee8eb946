"""`nibble serve --detach`, `nibble logs`, `nibble stop` with a real server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nibble.machine.process_table import processes
from nibble.serve.background import Place
from nibble.serve.control import ControlServer
from tests.support.servers.serving import START_TIMEOUT_S, clean_environ, free_port


class Shell:
    """nibble's commands as a user types them, for one port and one cache."""

    def __init__(self, folder: Path) -> None:
        self.port, self.control_port = free_port(), free_port()
        ports = {"PORT": str(self.port), "NIBBLE_CONTROL_PORT": str(self.control_port)}
        self.environ = clean_environ(folder, **ports)
        self.place = Place(folder / "nibble", self.port)

    def __call__(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "nibble", *words]
        environ = self.environ | more
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, check=False, timeout=120
        )


@pytest.fixture
def nibble(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    if shell.place.is_running() and (record := shell.place.read()):
        os.kill(record.pid, signal.SIGKILL)


def children_of(pid: int) -> set[int]:
    return {one.pid for one in processes() if one.parent == pid}


def wait_for(done: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow  # the next ones start and stop without waiting for ready
def test_a_server_in_the_background_is_started_followed_refused_twice_and_stopped(
    nibble: Shell,
) -> None:
    started = nibble("serve", "--detach", "nibble-demo", "--json")
    assert started.returncode == 0, started.stderr
    told = json.loads(started.stdout)
    assert told["port"] == nibble.port and Path(told["log"]).stat().st_mode & 0o077 == 0
    assert "nibble logs -f --port" in started.stderr

    follower = subprocess.Popen(
        [sys.executable, "-m", "nibble", "logs", "-f"],
        env=nibble.environ,
        stdout=subprocess.PIPE,
        text=True,
    )
    again = nibble("serve", "--detach", "nibble-demo")
    assert again.returncode == 5 and f"pid {told['pid']}" in again.stderr

    wait_for(lambda: "[nibble] ready in" in Path(told["log"]).read_text(), START_TIMEOUT_S)
    assert "[nibble] ready in" in nibble("logs").stdout
    engine = [one.pid for one in processes() if one.parent == told["pid"]]
    stopped = nibble("stop")
    assert stopped.returncode == 0 and "ended with code 0" in stopped.stderr
    assert follower.wait(20) == 0 and follower.stdout is not None
    assert "drained and stopped" in follower.stdout.read()
    assert engine and not [one for one in processes() if one.pid in engine]
    assert "drained and stopped" in nibble("logs", "-n", "5").stdout  # the log outlives the server
    after = nibble("stop")
    assert after.returncode == 0 and "no server runs" in after.stderr
    kept = nibble(
        "cache", "verify"
    ).stdout.splitlines()  # what it compiled is on record for the next start
    assert len(kept) == 2 and all(line.endswith(": sound") for line in kept), kept


def test_an_error_of_the_start_is_told_by_the_command_that_detached_it(
    nibble: Shell, tmp_path: Path
) -> None:
    failed = nibble("serve", "--detach", str(tmp_path / "nothing"))
    assert failed.returncode == 4
    assert (
        failed.stderr.startswith("nibble: error: ") and str(tmp_path / "nothing") in failed.stderr
    )
    assert not nibble.place.is_running()


def test_another_server_on_its_ports_is_not_taken_for_it(nibble: Shell) -> None:
    """Such as one in the foreground, whose control port answers while the new one finds PORT in
    use.
    """
    other = ControlServer(nibble.control_port, lambda: {"pid": os.getpid()}, lambda: True)
    other.start()
    try:
        with socket.create_server(("127.0.0.1", nibble.port)):
            failed = nibble("serve", "--detach", "nibble-demo")
    finally:
        other.close()
    assert failed.returncode == 5 and "in use" in failed.stderr
    assert "in the background" not in failed.stderr


def test_a_server_that_was_killed_is_recognised_and_another_may_start(nibble: Shell) -> None:
    assert nibble("serve", "--detach", "nibble-demo").returncode == 0
    record = nibble.place.read()
    assert record is not None and nibble.place.is_running()
    wait_for(lambda: bool(children_of(record.pid)), 10)
    children = children_of(record.pid)
    os.kill(record.pid, signal.SIGKILL)
    wait_for(lambda: not nibble.place.is_running(), 10)
    wait_for(lambda: not [one for one in processes() if one.pid in children], 5)
    stale = nibble("stop")
    assert stale.returncode == 0 and f"pid {record.pid} ended without an exit code" in stale.stderr
    assert nibble("serve", "--detach", "nibble-demo").returncode == 0
    assert nibble("stop").returncode == 0


def test_logs_and_stop_without_a_server_say_so(nibble: Shell) -> None:
    logs = nibble("logs")
    assert logs.returncode == 2 and "nibble serve --detach" in logs.stderr
    assert nibble("stop").returncode == 0

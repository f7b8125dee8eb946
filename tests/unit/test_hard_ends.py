"""One server on a port, processes that are killed, and text that reaches a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from nibble.cli.status import status_lines
from nibble.engine import guardian
from nibble.errors import ExitCode, NibbleError
from nibble.machine.early_stop import VERBS
from nibble.machine.process_table import processes
from nibble.machine.processes import started_ticks
from nibble.printable import printable
from nibble.serve.control import ControlServer
from nibble.serve.crash_loop import Breaker
from nibble.serve.port_lock import hold_port, overlap
from nibble.serve.sd_notify import Heartbeat, Notifier
from nibble.serve.unread import Queue, Unread, parse, send_queues
from tests.support.paths import ROOT
from tests.support.servers.serving import free_port

# --- one server on a port ---


@pytest.mark.parametrize(
    ("first", "second", "is_refused"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "0.0.0.0", True),
        ("0.0.0.0", "127.0.0.1", True),
        ("::", "0.0.0.0", True),
        ("[::1]", "::1", True),
        ("127.0.0.1", "127.0.0.2", False),
        ("127.0.0.1", "::1", False),
    ],
)
def test_the_second_server_on_an_address_is_refused(
    first: str, second: str, is_refused: bool
) -> None:
    port = free_port()
    with hold_port(first, port), ExitStack() as stack:
        if is_refused:
            with pytest.raises(NibbleError, match=f"PORT {port} is in use") as caught:
                stack.enter_context(hold_port(second, port))
            assert caught.value.code == ExitCode.CONFIG
        else:
            stack.enter_context(hold_port(second, port))
    with hold_port(second, port):  # free again
        pass


def test_of_servers_that_take_overlapping_addresses_at_one_moment_one_gets_them() -> None:
    for _ in range(20):
        port, held, tried = free_port(), [], threading.Barrier(3)

        def take(
            host: str, port: int = port, held: list[str] = held, tried: threading.Barrier = tried
        ) -> None:
            try:
                with hold_port(host, port):
                    held.append(host)
                    tried.wait(30)  # until the others were refused, however late they start
            except NibbleError:
                tried.wait(30)

        threads = [
            threading.Thread(target=take, args=(host,)) for host in ("127.0.0.1", "0.0.0.0", "::")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(held) == 1


def test_vllms_own_bind_and_listen_work_beside_the_lock() -> None:
    port = free_port()
    with hold_port("127.0.0.1", port), socket.socket() as vllm:
        vllm.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        vllm.bind(("127.0.0.1", port))
        vllm.listen()


def test_a_killed_process_holds_nothing() -> None:
    port = free_port()
    program = (
        f"from nibble.serve.port_lock import hold_port\nwith hold_port('127.0.0.1', {port}):\n"
        " print(1, flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None and process.stdout.readline() == b"1\n"
    with pytest.raises(NibbleError), hold_port("127.0.0.1", port):
        pass
    process.kill()
    process.communicate()
    with hold_port("127.0.0.1", port):
        pass


def test_addresses_overlap_where_one_stands_for_all() -> None:
    assert (
        overlap("::", "10.0.0.1") and overlap("10.0.0.1", "::") and overlap("0.0.0.0", "10.0.0.1")
    )
    assert not overlap("0.0.0.0", "::1") and not overlap("10.0.0.1", "10.0.0.2")


# --- the guardian ---

FAMILY = """
import os, subprocess, sys, time
from pathlib import Path
from nibble.engine.process import Engine
import queue
folder = Path(sys.argv[1])
program = "import subprocess as s, time; s.Popen(['setsid', 'sleep', '300']); s.Popen(['sleep', '300']); time.sleep(300)"
import nibble.engine.process
nibble.engine.process.child_command = lambda argv: [sys.executable, "-c", program]
engine = Engine([], os.environ, queue.SimpleQueue(), folder)
print(engine.pid, engine._guardian.pid, flush=True)
if sys.argv[2] == "kill":
    time.sleep(300)
engine.kill()
"""  # noqa: E501


@pytest.mark.parametrize("how", ["kill", "end"])
def test_nothing_is_left_of_a_killed_supervisor_nor_of_one_that_ends(
    how: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", FAMILY, str(folder), how],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    engine, guard = map(int, process.stdout.readline().split())
    if how == "kill":
        until = time.monotonic() + 10
        while (
            len(guardian.members(engine, started_ticks(engine), "-")) < 3
            and time.monotonic() < until
        ):
            time.sleep(0.02)
        left = {one.pid for one in guardian.members(engine, started_ticks(engine), "-")} | {guard}
        assert len(left) >= 4  # with the one that left the session
        process.send_signal(signal.SIGKILL)
    else:
        left = {engine, guard}
    told = process.communicate(timeout=20)[1]
    until = time.monotonic() + 5
    while time.monotonic() < until and left & {one.pid for one in processes()}:
        time.sleep(0.02)
    assert not left & {one.pid for one in processes()}
    assert ("nibble was killed" in told) == (how == "kill")
    assert folder.exists() == (how == "end")


def test_a_session_whose_number_another_process_has_by_now_is_left_alone() -> None:
    other = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        assert guardian.members(other.pid, started_ticks(other.pid), "-")
        assert not guardian.members(other.pid, "1", "-")
    finally:
        other.kill()
        other.wait()


# --- early stops ---

EARLY = """
import signal, sys
from nibble.machine.early_stop import over, stop_early
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
stop_early(sys.argv[2:])
if sys.argv[1] == "over": over()
try:
    print("up", flush=True)
    sys.stdin.read()
finally:
    print("cleaned up", flush=True)
"""


@pytest.mark.parametrize(
    ("words", "when", "code", "lines"),
    [
        *(([verb], "before", 0, 1) for verb in VERBS),
        (["serve", "--detach"], "before", -15, 0),
        (["plan"], "before", -15, 0),
        (["serve"], "over", 0, 0),
    ],
)
def test_a_stop_signal_before_the_start(words: list[str], when: str, code: int, lines: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", EARLY, when, *words],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=10)
    assert process.returncode == code
    assert err.count("SIGTERM before the start: stopped; no server was running") == lines
    assert ("cleaned up" in out) == (code == 0)


THREAD = """
import sys, threading, time
from nibble.machine import early_stop
early_stop.LONGEST_END_S = 1
early_stop.stop_early(["serve"])
threading.Thread(target=time.sleep, args=(60,)).start()
print("up", flush=True)
time.sleep(60)
"""


def test_a_stop_before_the_start_does_not_wait_for_a_thread() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", THREAD],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    err = process.communicate(timeout=20)[1]
    assert process.returncode == 0 and err.count("\n") == 1


# --- clients that do not read ---


def test_a_client_that_does_not_read_is_named_with_how_long() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            taken = server.accept()[0]
            taken.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    taken.send(b"x" * 65536)
            time.sleep(0.3)  # until the kernel has sent what fits
            address = "{}:{}".format(*client.getsockname())
            assert [queue.client for queue in send_queues(port)] == [address]
            unread = Unread(port)
            unread.look(100.0)
            unread.look(112.0)
            assert unread.clients(112.0).startswith(f"{address} (for 12 s, ")
            taken.close()
    assert Unread(port).clients(0) == ""


def test_a_client_that_takes_some_counts_from_then() -> None:
    unread = Unread(1)
    for at, size in ((0, 500), (10, 400), (15, 400)):
        unread.look(at, [Queue("a:1", size), Queue("b:2", 9)])
    assert unread.clients(15) == "b:2 (for 15 s, 9 bytes wait), a:1 (for 5 s, 400 bytes wait)"
    # The other one took some a moment ago
    assert unread.clients(11) == "b:2 (for 11 s, 9 bytes wait)"


@pytest.mark.parametrize(
    ("line", "client"),
    [
        ("0: 0100007F:1F90 0200007F:D431 01 00000010:00000000 01:0", "127.0.0.2:54321"),
        ("0: 0100007F:1F90 0200007F:D431 01 00000000:00000000 01:0", None),
        ("0: 0100007F:1F91 0200007F:D431 01 00000010:00000000 01:0", None),
        ("0: 0100007F:1F90 00000000:0000 0A 00000010:00000000 00:0", None),
        (
            f"0: {'0' * 24}01000000:1F90 {'0' * 24}01000000:D431 01 00000010:00000000 01:0",
            "[::1]:54321",
        ),
        (
            f"0: {'0' * 32}:1F90 {'0' * 16}FFFF00000200007F:D431 01 00000010:00000000 01:0",
            "127.0.0.2:54321",
        ),
    ],
)
def test_lines_of_proc_net_tcp(line: str, client: str | None) -> None:
    found = parse(line, 8080)
    assert (found and found.client) == client


# --- systemd ---


def test_what_systemd_is_told(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(5)
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "300000"}
        notifier = Notifier(environ | {"WATCHDOG_PID": str(os.getpid())})
        notifier.send("READY=1", "STATUS=serving")
        assert systemd.recv(1000) == b"READY=1\nSTATUS=serving"
        assert Notifier(environ | {"WATCHDOG_PID": "1"}).watchdog_s == 0
        Notifier({}).send("READY=1")
        assert Notifier({}).watchdog_s == 0

        control = ControlServer(0, dict, lambda: False)
        control.start()
        over, now = threading.Event(), [0.0]
        heartbeat = Heartbeat(notifier, control.port, lambda: now[0])
        thread = threading.Thread(target=heartbeat.run, args=(over,), daemon=True)
        thread.start()
        assert systemd.recv(1000) == b"WATCHDOG=1"
        now[0] = 1.0  # the main loop stands still
        systemd.settimeout(0.5)
        assert is_silent(systemd)
        heartbeat.turn()
        assert systemd.recv(1000) == b"WATCHDOG=1"
        control.close()
        assert is_silent(systemd)
        over.set()
        thread.join(5)


def is_silent(systemd: socket.socket) -> bool:
    """Whether nothing comes any more, after what came already."""
    for _ in range(5):
        try:
            systemd.recv(1000)
        except TimeoutError:
            return True
    return False


# --- text ---


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢 \t\n", "plain é 漢 \t\n"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("a\x1b]0;title\x07b", "ab"),
        ("a\x1b]8;;http://x\x1b\\link", "alink"),
        ("a\x9b2Jb\x1b(0c\x1bcd", "abcd"),
        ("a\r\x00\x08\x7fb", "ab"),
        ("a\u202eb\u2066c\u2028d", "abcd"),
        ("a\x1b", "a"),
    ],
)
def test_text_from_elsewhere(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_errors_and_status_reach_the_terminal_without_escape_codes() -> None:
    assert (
        NibbleError(ExitCode.MODEL, what="a\x1b[2Jb", expected="c\x07").line() == "ab; expected c"
    )
    status = {"state": "ready\x1b]0;x\x07", "phase": "ready\x1b]0;x\x07", "detail": "\x1b[31m"}
    assert "\x1b" not in "\n".join(status_lines(status))


def test_a_recorded_cause_is_told_without_escape_codes(tmp_path: Path) -> None:
    breaker = Breaker(tmp_path / "r.json", "m", lambda text: None)
    failures = [
        {"at_s": time.time(), "code": 10, "cause": "no\x1b[31m room\x1b]0;t\x07", "process": ""}
        for _ in range(3)
    ]
    breaker.path.write_text(json.dumps({"failures": failures}))
    assert breaker.verdict().cause == "no room"


@pytest.mark.parametrize("opening", ["[", '{"failures":'])
def test_a_record_nested_without_end_is_damaged(opening: str, tmp_path: Path) -> None:
    told: list[str] = []
    breaker = Breaker(tmp_path / "r.json", "m", told.append)
    breaker.path.write_text(opening * 100_000)
    assert breaker.verdict().failures == 0
    assert len(told) == 1 and "is damaged; nibble drops it (RecursionError)" in told[0]
    assert not breaker.path.exists()

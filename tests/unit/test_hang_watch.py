"""The hang watch and the processes it looks at: pulses, stacks, and what happens where something
hangs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nibble.engine.api import Api
from nibble.engine.contract.pulse import HEALTH, IDLE, PULSE_BYTES, STEP
from nibble.engine.plugin import pulse as plugin
from nibble.engine.pulse import Pulse, read_pulses
from nibble.engine.stack_dump import dump_stacks
from nibble.machine import gpu_state
from nibble.serve.hang.watch import Hang, HangWatch

WAITING = """
import sys, threading, time
from pathlib import Path
from nibble.engine.plugin.pulse import _arm
_arm(Path(sys.argv[1]))
def hangs_in_the_driver():
    print("armed", flush=True)
    time.sleep(60)
hangs_in_the_driver()
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that the plugin is in."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "armed\n"
    yield process
    process.kill()
    process.communicate()


def test_what_the_plugin_writes_is_read(tmp_path: Path) -> None:
    written = plugin.Pulse(tmp_path / "engine-5")
    assert read_pulses(tmp_path) == (Pulse("engine", os.getpid(), IDLE, False, 0, 0, 0),)
    written.doing, written.paused, written.turns, written.requests, written.tokens = (
        STEP,
        True,
        9,
        3,
        512,
    )
    written.write()
    assert read_pulses(tmp_path) == (Pulse("engine", os.getpid(), STEP, True, 9, 3, 512),)


@pytest.mark.parametrize("content", [b"", b"x", b"\0" * PULSE_BYTES, b"\xff" * 1000])
def test_a_damaged_pulse_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "api-1").write_bytes(content)
    assert read_pulses(tmp_path) == ()


def test_the_probe_is_kept_out_of_the_access_log_and_nothing_else_is() -> None:
    import logging

    def line(path: str) -> logging.LogRecord:
        args = ("127.0.0.1:1", "GET", path, "1.1", 200)
        return logging.LogRecord(
            "uvicorn.access", logging.INFO, "", 1, '%s - "%s %s HTTP/%s" %d', args, None
        )

    assert not plugin._is_users(line(HEALTH))
    assert plugin._is_users(line("/health")) and plugin._is_users(line("/v1/models"))


def test_the_stacks_of_a_process_with_the_plugin(
    child: subprocess.Popen[str], tmp_path: Path
) -> None:
    text = dump_stacks(tmp_path, [child.pid])[child.pid]
    assert "in hangs_in_the_driver" in text and "State: S" in text
    assert child.poll() is None


def test_a_stopped_process_writes_its_stacks_once_it_is_woken(
    child: subprocess.Popen[str], tmp_path: Path
) -> None:
    child.send_signal(signal.SIGSTOP)
    without = dump_stacks(tmp_path, [child.pid])[child.pid]
    assert "State: T (stopped)" in without and "hangs_in_the_driver" not in without
    assert "in hangs_in_the_driver" in dump_stacks(tmp_path, [child.pid], wake=True)[child.pid]


def test_a_process_without_the_plugin_is_not_killed_by_the_question(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "60"])
    try:
        text = dump_stacks(tmp_path, [other.pid])[other.pid]
        assert "State:" in text
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("is_on", [True, False])
def test_a_stopped_process_is_told_once_with_its_stacks_and_not_where_the_watch_is_off(
    is_on: bool, tmp_path: Path
) -> None:
    hangs: list[Hang] = []
    over = threading.Event()
    api = Api("127.0.0.1", 1, "")
    limit_s = 1.0 if is_on else 0.0
    watch = HangWatch(limit_s, tmp_path / "pulse", api, True, lambda: False, hangs.append)
    engine = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        engine.send_signal(signal.SIGSTOP)
        thread = threading.Thread(target=watch.run, args=(engine.pid, over), daemon=True)
        thread.start()
        thread.join(8)
        assert not thread.is_alive()
    finally:
        over.set()
        engine.kill()
        engine.wait()
    assert len(hangs) == (1 if is_on else 0)
    if is_on:
        assert hangs[0].stall.what == f"API server (pid {engine.pid}) is stopped (state T)"
        assert "State: " in hangs[0].stacks[f"API server (pid {engine.pid})"]


def test_an_api_server_that_takes_connections_and_says_nothing_is_found(tmp_path: Path) -> None:
    import socket

    hangs: list[Hang] = []
    over = threading.Event()
    engine = subprocess.Popen(["sleep", "60"], start_new_session=True)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        api = Api("127.0.0.1", silent.getsockname()[1], "")
        watch = HangWatch(1.0, tmp_path / "pulse", api, False, lambda: True, hangs.append)
        try:
            threading.Thread(target=watch.ask_api, args=(over,), daemon=True).start()
            thread = threading.Thread(target=watch.run, args=(engine.pid, over), daemon=True)
            thread.start()
            began = time.monotonic()
            thread.join(8)
            assert not thread.is_alive() and time.monotonic() - began < 5
        finally:
            over.set()
            engine.kill()
            engine.wait()
    assert hangs[0].stall.kind == "api"


def test_a_driver_that_does_not_answer_or_is_not_there_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hang(indices: object) -> list[gpu_state.GpuState]:
        time.sleep(1)
        return []

    xids = gpu_state.XidLog([7])  # no machine of the tests has that many
    assert xids.read() == []
    assert gpu_state.gpu_report([7], xids) == ["NVML does not report the state of the GPUs"]
    monkeypatch.setattr(gpu_state, "_look", hang)
    monkeypatch.setattr(gpu_state, "REPORT_S", 0.1)
    assert gpu_state.gpu_report([7], xids) == ["NVML did not answer within 0 s"]


class Nvml:
    """Two GPUs as NVML tells them, of which one can be lost."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM = NVML_TEMPERATURE_GPU = nvmlEventTypeXidCriticalError = 0

    def __init__(self) -> None:
        self.lost: set[int] = set()
        self.events = [SimpleNamespace(device=1, eventData=79)]

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.lost:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=100)

    def nvmlEventSetWait_v2(self, *_: Any) -> Any:
        if not self.events:
            raise self.NVMLError("Timeout")
        return self.events.pop()


def test_xids_and_each_gpus_state_are_told_also_where_one_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    xids = gpu_state.XidLog([0, 1])
    nvml.lost = {1}
    told = gpu_state.gpu_report([0, 1], xids)
    assert told[0] == "GPU 1: Xid 79"
    assert told[1].startswith("GPU 0: P2, ") and told[2] == "GPU 1: GPU is lost"
    assert [one.index for one in gpu_state.gpu_states([0, 1])] == [0]


@pytest.mark.parametrize("takes", [True, False])
def test_requests_that_an_idle_engine_leaves_are_a_hang_unless_a_new_one_is_answered(
    takes: bool, tmp_path: Path
) -> None:
    """Sessions of /v1/realtime wait for their client: that a request is open is not yet a hang."""
    asked: list[str] = []

    class Vllm(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            asked.append(self.path)
            if takes:
                self.do_GET()
            else:
                time.sleep(3)

        def log_message(self, format: str, *args: object) -> None:
            pass

    hangs: list[Hang] = []
    over = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Vllm)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    api = Api("127.0.0.1", server.server_address[1], "")
    watch = HangWatch(0.6, tmp_path / "pulse", api, False, lambda: True, hangs.append)
    watch.generating_name = "m"
    core, waiting = (
        plugin.Pulse(tmp_path / "pulse" / "engine-1"),
        plugin.Pulse(tmp_path / "pulse" / "api-2"),
    )
    core.write()
    waiting.requests = 1
    waiting.write()
    engine = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        threading.Thread(target=watch.ask_api, args=(over,), daemon=True).start()
        thread = threading.Thread(target=watch.run, args=(engine.pid, over), daemon=True)
        thread.start()
        thread.join(3 if takes else 10)
    finally:
        over.set()
        engine.kill()
        engine.wait()
        server.shutdown()
        server.server_close()
    assert asked and set(asked) == {"/v1/completions"}
    assert [hang.stall.kind for hang in hangs] == ([] if takes else ["untaken"])

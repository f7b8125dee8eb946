"""Hangs and hard ends with a real vLLM: what stands still is ended with a reason, and no client
waits for it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nibble.machine.hardware import detect
from nibble.machine.process_table import processes
from tests.support.models.slow_model import make_slow_model
from tests.support.paths import ROOT
from tests.support.servers.serving import Server, Stream, free_port
from tests.support.vllm_plugins.hanging_worker import install_hanging

pytestmark = pytest.mark.vllm
FLAGS = ("--enforce-eager", "--max-model-len", "2048")
HANG_S = 5
END_S = 15.0  # stacks, the clients' errors and vLLM's own end, on a shared machine
LONG = 1900
WORKER_APART = "--distributed-executor-backend mp"  # alone it shares the engine's process

Start = Callable[..., Server]


@pytest.fixture(scope="module")
def model() -> Path:
    if detect().gpus:
        return make_slow_model(ROOT / ".cache" / "slow_model_gpu", layers=48)
    return make_slow_model(ROOT / ".cache" / "slow_model")


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[Start]:
    servers: list[Server] = []

    def begin(**environ: str) -> Server:
        words = ["serve", str(model), *FLAGS]
        environ = {"NIBBLE_HANG_SECONDS": str(HANG_S), **environ}
        servers.append(Server(tmp_path / f"server{len(servers)}", words, **environ))
        return servers[-1]

    yield begin
    for server in servers:
        server.end()


def streaming(server: Server) -> Stream:
    return server.wait_until_ready().stream(LONG).wait_for(10)


def pid_of(server: Server, title: str) -> int:
    found = [one.pid for one in server.engine_processes() if one.name.startswith(title[:15])]
    assert found, f"no {title} in {server.engine_processes()}"
    return found[0]


def assert_ended_as_hung(server: Server, stream: Stream | None, began: float, who: str) -> None:
    assert server.wait(HANG_S + END_S) == 10
    assert time.monotonic() - began < HANG_S + END_S
    if stream is not None:
        assert stream.join(5).finish_reason is None  # an end, and no whole answer
    assert server.engine_processes() == []
    said = "\n".join(server.said())
    assert re.search(rf"vLLM hangs: {who}.* for \d+ s; new requests get 503", said), said[-3000:]
    assert re.search(rf"nibble: error: vLLM hangs in phase ready: {who}", server.err.read_text())


def test_a_step_that_never_ends_is_found_and_a_long_one_is_not(
    start: Start, tmp_path: Path
) -> None:
    plugin = tmp_path / "plugin"
    server = start(**install_hanging(plugin)).wait_until_ready()
    # Longer than the limit, with a prompt of nearly the whole context: a server that makes
    # progress does not hang.
    prompt = " ".join(f"word{number % 500}" for number in range(1800))
    body = {"model": "default", "prompt": prompt, "max_tokens": 100, "ignore_eos": True}
    assert server.ask("/v1/completions", body, timeout_s=120)[0] == 200
    stream = server.stream(1500).wait_for(10)
    until = time.monotonic() + 1.5 * HANG_S
    while time.monotonic() < until and stream.finish_reason is None:
        assert server.is_ready()
        time.sleep(0.5)
    status = server.status()
    assert status is not None and status["hang"]["has_pulse"]
    assert status["hang"]["waited_s"] < HANG_S
    # A second server on this port is refused before it does anything.
    second = start(PORT=str(server.port))
    assert second.wait(30) == 5
    assert (
        f"PORT {server.port} is in use on 127.0.0.1: another nibble starts or serves there"
        in second.log()
    )

    stream = server.stream(1500).wait_for(10)
    (plugin / "hang").touch()
    began, reasons = time.monotonic(), set[str]()
    while server.process.poll() is None and time.monotonic() - began < HANG_S + END_S:
        with contextlib.suppress(OSError):
            status_code, answer = server._get(server.control_port, "/ready")
            if status_code == 503:
                reasons.add(answer.decode())
        time.sleep(0.1)
    assert_ended_as_hung(
        server,
        stream,
        began,
        r"VLLM::EngineCore \(pid \d+\) has not finished a step with \d+ token",
    )
    assert stream.error
    assert any('"ready": false' in one and "has not finished a step" in one for one in reasons), (
        reasons
    )
    assert re.search(
        r"VLLM::EngineCore \(pid \d+\): +File .*hanging_worker.py", server.err.read_text()
    )


@pytest.mark.slow
@pytest.mark.parametrize("title", ["VLLM::EngineCore", "VLLM::Worker"])
@pytest.mark.parametrize("is_busy", [True, False])
def test_a_stopped_process_of_the_engine_is_found(title: str, is_busy: bool, start: Start) -> None:
    server = start(VLLM_EXTRA_ARGS=WORKER_APART).wait_until_ready()
    stream = streaming(server) if is_busy else None
    os.kill(pid_of(server, title), signal.SIGSTOP)
    assert_ended_as_hung(
        server, stream, time.monotonic(), rf"{title} \(pid \d+\) is stopped \(state T\)"
    )


@pytest.mark.slow
def test_a_stop_signal_does_not_wait_for_a_stopped_engine(start: Start) -> None:
    server = start(NIBBLE_DRAIN_SECONDS="60", NIBBLE_HANG_SECONDS="60").wait_until_ready()
    stream = streaming(server)
    os.kill(pid_of(server, "VLLM::EngineCore"), signal.SIGSTOP)
    began = time.monotonic()
    server.signal()
    assert server.wait(60) == 10
    assert time.monotonic() - began < END_S + 12  # a last look after up to 5 s, 5 s of the limit
    assert "is stopped (state T)" in server.err.read_text() and stream.error


@pytest.mark.slow
def test_a_stopped_api_server_is_found(start: Start) -> None:
    server = start()
    stream = streaming(server)
    assert server.engine_pid is not None
    os.kill(server.engine_pid, signal.SIGSTOP)
    assert_ended_as_hung(
        server, stream, time.monotonic(), r"API server \(pid \d+\) is stopped \(state T\)"
    )


@pytest.mark.slow  # test_serve.py kills one during load
def test_a_killed_supervisor_leaves_no_engine_and_no_waiting_client(start: Start) -> None:
    server = start(NIBBLE_DRAIN_SECONDS="60")
    stream = streaming(server)
    children = {one.pid for one in processes() if one.parent == server.process.pid}
    began = time.monotonic()
    server.process.kill()
    stream.join(5)
    assert stream.finish_reason is None
    while time.monotonic() - began < 5 and (server.engine_processes() or alive(children)):
        time.sleep(0.05)
    assert server.engine_processes() == [] and not alive(children)
    assert "[nibble] nibble was killed: ending vLLM at once" in server.said()


def alive(pids: set[int]) -> set[int]:
    return {one.pid for one in processes() if one.pid in pids}


@pytest.mark.slow
def test_half_a_request_does_not_hold_a_stop_up(start: Start) -> None:
    server = start(
        NIBBLE_DRAIN_SECONDS="40", NIBBLE_API_KEY="a-key-of-the-test", NIBBLE_BODY_GAP_SECONDS="60"
    ).wait_until_ready()
    with contextlib.ExitStack() as stack:
        clients = []
        for is_known in (True, True, False):
            client = stack.enter_context(
                socket.create_connection(("127.0.0.1", server.port), timeout=END_S)
            )
            key = "Authorization: Bearer a-key-of-the-test\r\n" if is_known else ""
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{key}Content-Length: 1000\r\n\r\n"
            client.sendall(head.encode() + b'{"model": "default", "prom')
            clients.append(client)
        time.sleep(1)
        began = time.monotonic()
        server.signal()
        for client in clients:
            with contextlib.suppress(ConnectionResetError):
                while client.recv(1 << 16):  # an answer or none, and the end of the connection
                    pass
        assert time.monotonic() - began < END_S  # of 40
        assert server.wait(45) == 0
        assert "[nibble] drained and stopped" in server.said()


# From 50 ms on: before that the shell itself is not there yet on a busy machine.
MOMENTS_S = [round(0.05 + step * 0.1, 2) for step in range(10)]
FEW = MOMENTS_S[::4]


@pytest.mark.parametrize(
    "after_s",
    [pytest.param(one, marks=() if one in FEW else pytest.mark.slow) for one in MOMENTS_S],
)
def test_an_early_stop_is_0_with_one_line(after_s: float, tmp_path: Path) -> None:
    server = Server(tmp_path / "server", ["serve", "nibble-demo"])
    time.sleep(after_s)
    server.signal()
    assert server.wait(30) == 0, server.log()
    lines = [line for line in server.log().splitlines() if "no server was running" in line]
    assert len(lines) == 1, server.log()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"), [("127.0.0.1", "0.0.0.0"), ("0.0.0.0", "::"), ("::1", "::1")]
)
def test_of_two_servers_that_start_at_once_with_one_port_one_is_refused(
    first: str, second: str, tmp_path: Path
) -> None:
    port = str(free_port())
    key = {"NIBBLE_API_KEY": "a-key-of-the-test"}
    servers = [
        Server(tmp_path / f"s{number}", ["serve", "nibble-demo", "--port", port], HOST=host, **key)
        for number, host in enumerate((first, second))
    ]
    try:
        until = time.monotonic() + 30
        while all(one.process.poll() is None for one in servers) and time.monotonic() < until:
            time.sleep(0.05)
        ended = [one for one in servers if one.process.poll() is not None]
        assert ended and ended[0].process.returncode == 5, [one.log()[-2000:] for one in servers]
        assert f"PORT {port} is in use" in ended[0].log()
        assert time.monotonic() - ended[0].started < 30
    finally:
        for one in servers:
            one.end()

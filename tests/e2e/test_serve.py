"""The supervisor with a real vLLM: start, status, answers, drain, and every way to end.

The model (support/models/slow_model.py) is slow enough to be streaming when a signal comes.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.models.slow_model import make_slow_model
from tests.support.paths import ROOT
from tests.support.servers.serving import Server

pytestmark = pytest.mark.vllm
FLAGS = ("--enforce-eager", "--max-model-len", "2048")
LONG = (
    1500  # tokens; more than any machine here produces before the test is through with the stream
)

Start = Callable[..., Server]


@pytest.fixture(scope="module")
def model() -> Path:
    return make_slow_model(ROOT / ".cache" / "slow_model")


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[Start]:
    """Starts servers that are gone after the test."""
    servers: list[Server] = []

    def begin(*flags: str, **environ: str) -> Server:
        words = ["serve", str(model), *FLAGS, *flags]
        servers.append(Server(tmp_path / str(len(servers)), words, **environ))
        return servers[-1]

    yield begin
    for server in servers:
        server.end()


class TestOneServer:
    """One server for all that leaves it running; the last test ends it."""

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        folder = tmp_path_factory.mktemp("server")
        server = Server(folder, ["serve", str(model), *FLAGS], NIBBLE_DRAIN_SECONDS="90")
        cls.first = server.wait_for_status()
        cls.first_after_s = time.monotonic() - server.started
        yield server.wait_until_ready()
        server.end()

    first: dict
    first_after_s: float

    def test_status_is_answered_before_the_engine_has_said_a_word(self, server: Server) -> None:
        assert (self.first["state"], self.first["phase"]) == ("starting", "start")
        assert self.first["plan"]["command"][:2] == ["vllm", "serve"]
        assert self.first["pid"] == server.process.pid

    def test_phases_come_in_order_and_end_in_ready(self, server: Server) -> None:
        status = server.status()
        assert status is not None
        history = [entry["phase"] for entry in status["history"]]
        phases = [phase for phase in history if phase != "autotune"]  # a GPU has that too
        assert phases == ["start", "load", "warm-up", "canary", "ready"]
        times = [entry["at_s"] for entry in status["history"]]
        assert times == sorted(times)
        assert status["facts"]["kv_cache_tokens"] > 0
        told = "\n".join(server.said())
        assert re.search(
            r"load.*\n(?s:.*)warm-up.*\n(?s:.*)ready in [\d.]+ s: http://127.0.0.1:\d+/v1", told
        )

    def test_the_model_answers_chat_as_default_and_by_its_name(self, server: Server) -> None:
        for name in ("default", "slow_model"):
            question = {
                "model": name,
                "messages": [{"role": "user", "content": "word1"}],
                "max_tokens": 5,
            }
            status, answer = server.ask("/v1/chat/completions", {**question, "ignore_eos": True})
            assert status == 200
            assert answer["usage"]["completion_tokens"] == 5

    def test_the_command_it_prints_works_when_pasted(self, server: Server) -> None:
        line = next(line for line in server.said() if "try: curl" in line)
        command = line.split("try: ", 1)[1]
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True
        )
        assert '"object":"chat.completion"' in done.stdout

    def test_what_vllm_writes_passes_through_to_the_stream_it_wrote_to(
        self, server: Server
    ) -> None:
        assert "Loading weights took" in server.out.read_text()
        assert "Application startup complete" in server.err.read_text()
        assert "[nibble]" not in server.out.read_text()

    def test_a_drain_lets_the_running_stream_finish_refuses_new_requests_and_exits_0(
        self, server: Server
    ) -> None:
        stream = server.stream(tokens=700).wait_for(10)
        server.signal()
        refused = {}
        for _ in range(50):
            status, refused = server.ask(
                "/v1/completions", {"model": "default", "prompt": "word1", "max_tokens": 1}
            )
            if status == 503:
                break
            time.sleep(0.02)
        at_refusal = stream.chunks
        assert refused["error"]["state"] == "draining"
        assert at_refusal < 700, "the stream was over before the drain began: nothing was proved"
        assert server.status()["state"] == "draining"  # type: ignore[index]
        assert not server.is_ready()
        stream.join(90)
        assert (stream.error, stream.finish_reason, stream.completion_tokens) == (
            None,
            "length",
            700,
        )
        assert server.wait(30) == 0
        assert server.engine_processes() == []
        assert "[nibble] drained and stopped" in server.said()


@pytest.mark.slow
def test_a_drain_that_runs_out_of_time_exits_143_and_leaves_no_process(start: Start) -> None:
    server = start(NIBBLE_DRAIN_SECONDS="1").wait_until_ready()
    stream = server.stream(LONG).wait_for(10)
    began = time.monotonic()
    server.signal()
    assert server.wait(20) == 143
    assert time.monotonic() - began < 8
    assert stream.join(10).finish_reason is None
    assert server.engine_processes() == []
    assert "1 request(s) were unfinished after 1 s" in server.said()[-1]


@pytest.mark.slow
def test_a_second_signal_ends_at_once(start: Start) -> None:
    server = start(NIBBLE_DRAIN_SECONDS="90").wait_until_ready()
    server.stream(LONG).wait_for(10)
    server.signal(signal.SIGINT)
    time.sleep(1.5)  # within a second it would count as the same wish
    assert server.process.poll() is None
    assert server.status()["state"] == "draining"  # type: ignore[index]
    began = time.monotonic()
    server.signal(signal.SIGINT)
    assert server.wait(10) == 143
    assert time.monotonic() - began < 5
    assert server.engine_processes() == []


@pytest.mark.slow
def test_a_killed_api_server_exits_10_and_is_named_and_its_sockets_are_removed(
    start: Start,
) -> None:
    server = start().wait_until_ready()
    assert server.engine_pid
    variables = Path(f"/proc/{server.engine_pid}/environ").read_text().split("\0")
    folder = Path(dict(one.split("=", 1) for one in variables if one)["VLLM_RPC_BASE_PATH"])
    assert any(path.is_socket() for path in folder.iterdir())
    os.kill(server.engine_pid, signal.SIGKILL)
    assert server.wait(15) == 10
    assert server.engine_processes() == [] and not folder.exists()
    last = server.err.read_text().splitlines()[-1]
    assert "vLLM ended by itself in phase ready (API server killed by SIGKILL)" in last


def test_a_signal_during_load_stops_quickly_with_0(start: Start) -> None:
    server = start()
    server.wait_for_status()
    time.sleep(4)  # vLLM is importing
    began = time.monotonic()
    server.signal()
    assert server.wait(15) == 0
    assert time.monotonic() - began < 10
    assert server.engine_processes() == []


@pytest.mark.slow
def test_an_engine_that_cannot_start_exits_10_with_its_reason_in_one_line(
    start: Start, tmp_path: Path
) -> None:
    server = start("--tokenizer", str(tmp_path / "nowhere"))
    server.wait_for_status()
    assert server.wait(90) == 10
    assert re.search(
        r"vLLM ended by itself in phase start \(exit code 1\): [\w.]+: .*nowhere",
        server.err.read_text().splitlines()[-1],
    )


def test_vllm_does_not_outlive_a_killed_supervisor(start: Start) -> None:
    server = start()
    server.wait_for_status()
    time.sleep(4)
    assert server.engine_processes()
    server.signal(signal.SIGKILL)
    server.wait(5)
    deadline = time.monotonic() + 20
    while server.engine_processes() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert server.engine_processes() == []


def test_a_control_port_in_use_is_one_line_and_exit_5(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = start(NIBBLE_CONTROL_PORT=str(taken.getsockname()[1]))
        assert server.wait(30) == 5
    errors = [line for line in server.log().splitlines() if "error" in line]
    assert len(errors) == 1
    assert "NIBBLE_CONTROL_PORT" in errors[0]
    assert "Traceback" not in server.log()

"""A server under load and under attack: it keeps what can be kept, answers every client, and stays
up.

On a GPU: `python -m pytest tests/e2e/test_robustness.py --junitxml FILE`; FILE has what each test
counted and measured.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nibble.machine.hardware import detect
from tests.support.models.slow_model import make_slow_model
from tests.support.paths import ROOT
from tests.support.servers.malformed import NOT_HTTP, Malformed, malformed
from tests.support.servers.serving import Server, Stream

pytestmark = pytest.mark.vllm
Record = Callable[[str, object], None]
RUNNING, STREAMS = 32, 64  # half of the streams wait when the signal comes
FLAGS = ("--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", str(RUNNING))
LONG = 1900
# vllm 0.32 entrypoints/openai/completion/protocol.py:487 asks it for a key before it knows that it
# is an object.
NO_OBJECT = b'"structured_outputs": 1'


@pytest.fixture(scope="module")
def model() -> Path:
    """With more layers on a GPU, where a stream of the other would be over before anything
    happened to it.
    """
    if detect().gpus:
        return make_slow_model(ROOT / ".cache" / "slow_model_gpu", layers=48)
    return make_slow_model(ROOT / ".cache" / "slow_model")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """For all tests but the last of this file; the one before it ends it by SIGTERM."""
    folder = tmp_path_factory.mktemp("server")
    made = Server(folder, ["serve", str(model), *FLAGS], NIBBLE_DRAIN_SECONDS="150")
    yield made.wait_until_ready()
    made.end()


def open_streams(server: Server, count: int, tokens: int) -> list[Stream]:
    """All answered with their headers."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda _: server.stream(tokens), range(count)))


def tokens_in(server: Server, seconds: float) -> int:
    """How many tokens each of RUNNING streams gets in that time on this machine, about."""
    began = time.monotonic()
    for stream in open_streams(server, RUNNING, 8):
        stream.join(60)
    return max(12, min(LONG, int(8 * seconds / (time.monotonic() - began))))


def requests(server: Server) -> dict[str, float]:
    """How many run and wait inside vLLM, and the share of the KV cache that is taken."""
    names = {
        "running": "num_requests_running",
        "waiting": "num_requests_waiting",
        "kv": "kv_cache_usage_perc",
    }
    return {name: server.metric(metric) for name, metric in names.items()}


def answers(server: Server) -> bool:
    body = {"model": "default", "prompt": "word1 word2", "max_tokens": 3, "ignore_eos": True}
    status, answer = server.ask("/v1/completions", body)
    return status == 200 and answer["usage"]["completion_tokens"] == 3


def status_of(server: Server, request: Malformed) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        connection.request(
            "POST", request.path, request.body, {"Content-Type": request.content_type}
        )
        response = connection.getresponse()
        response.read()
        return response.status


def test_a_thousand_malformed_requests_are_refused_while_a_stream_goes_on(
    server: Server, record_property: Record
) -> None:
    stream = server.stream(LONG).wait_for(2)
    sent = malformed(1000)
    assert len(set(sent)) == 1000
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda request: status_of(server, request), sent))
    wrong = [
        (status, one.path, one.body[:200])
        for status, one in zip(found, sent, strict=True)
        if not (400 <= status < 500 or (status == 500 and NO_OBJECT in one.body))
    ]
    record_property("answers_by_status", dict(Counter(found)))
    assert not wrong, (Counter(found), wrong[:20])
    stream.wait_for(stream.chunks + 5).hang_up()
    assert answers(server) and server.is_ready()


def test_what_is_no_http_is_answered_or_closed(server: Server) -> None:
    for data in NOT_HTTP:
        with socket.create_connection(("127.0.0.1", server.port), 5) as connection:
            connection.settimeout(5)
            with contextlib.suppress(OSError):  # it may close before it has read all
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass
    assert answers(server) and server.is_ready()


def test_clients_that_disconnect_leave_nothing_running(
    server: Server, record_property: Record
) -> None:
    streams = open_streams(server, STREAMS, LONG)
    for stream in streams[:16]:
        stream.wait_for(1, 120)
    assert requests(server)["running"] >= 16
    for stream in streams:
        stream.hang_up()
    began = time.monotonic()
    while (now := requests(server))["running"] or now["waiting"]:
        assert time.monotonic() < began + 30, now
        time.sleep(0.2)
    record_property("streams", STREAMS)
    record_property("seconds_until_none_ran", round(time.monotonic() - began, 1))
    assert now["kv"] == 0
    assert answers(server) and server.is_ready()


def test_sigterm_loses_none_of_64_streams(server: Server, record_property: Record) -> None:
    tokens = tokens_in(server, 10)
    streams = open_streams(server, STREAMS, tokens)
    streams[0].wait_for(3, 120)
    assert not any(stream.finish_reason for stream in streams), (
        "a stream was over before the signal"
    )
    server.signal()
    began = time.monotonic()
    for stream in streams:
        stream.join(150)
    record_property("streams", STREAMS)
    record_property("tokens_each", tokens)
    record_property("seconds_to_drain", round(time.monotonic() - began, 1))
    found = Counter(
        (stream.error, stream.finish_reason, stream.completion_tokens) for stream in streams
    )
    assert found == {(None, "length", tokens): STREAMS}
    assert server.wait(30) == 0
    assert server.engine_processes() == []
    assert "[nibble] drained and stopped" in server.said()


def test_an_engine_killed_under_load_ends_every_stream_and_exits_10_and_a_key_stays_out_of_sight(
    model: Path, tmp_path: Path, record_property: Record
) -> None:
    """Also the server with a generated key, to save a start."""
    server = Server(tmp_path, ["serve", str(model), *FLAGS, "--host", "0.0.0.0"])
    try:
        server.wait_until_ready()
        check_key(server)
        key = key_file(server).read_text().strip()
        with ThreadPoolExecutor(STREAMS) as pool:
            streams = list(pool.map(lambda _: server.stream(LONG, key=key), range(STREAMS)))
        streams[0].wait_for(3, 120)
        engine = next(one for one in server.engine_processes() if "EngineCor" in one.name)
        os.kill(engine.pid, signal.SIGKILL)
        began = time.monotonic()
        for stream in streams:
            assert stream.join(30).finish_reason is None
        record_property("streams", STREAMS)
        record_property("seconds_until_all_ended", round(time.monotonic() - began, 1))
        assert server.wait(30) == 10
        record_property("seconds_until_exit_10", round(time.monotonic() - began, 1))
        assert server.engine_processes() == []
        last = server.err.read_text().splitlines()[-1]
        assert "nibble: error: vLLM ended by itself in phase ready" in last
        assert f"VLLM::EngineCore (pid {engine.pid}) ended first" in last
    finally:
        server.end()


def key_file(server: Server) -> Path:
    return Path(server.environ["NIBBLE_CACHE_DIR"]) / "api_key"


def check_key(server: Server) -> None:
    """It is asked for, and in no log, status or command line."""
    key = key_file(server).read_text().strip()
    assert server.ask("/v1/models")[0] == 401
    assert server.ask("/v1/models", key=key)[0] == 200
    assert any(str(key_file(server)) in line for line in server.said())
    shown = server.log() + str(server.status())
    for process in (server.process.pid, *(one.pid for one in server.engine_processes())):
        shown += Path(f"/proc/{process}/cmdline").read_text()
    assert key not in shown

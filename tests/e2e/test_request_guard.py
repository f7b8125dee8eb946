"""Requests made to stall or end the server: each is refused or answered, /health within a
second, streams go on.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.slow_model import make_slow_model
from tests.support.paths import ROOT
from tests.support.processor_time import with_neighbours
from tests.support.servers.guarded_server import KEY, post, read_all
from tests.support.servers.serving import Server, Stream

pytestmark = pytest.mark.vllm
Record = Callable[[str, object], None]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FLAGS = ("--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "16")
HEALTH_S = GAP_S = 1.0
LIMITS = {"NIBBLE_HEAD_SECONDS": "3", "NIBBLE_BODY_GAP_SECONDS": "3"}
USER = {"role": "user", "content": "word1"}
SOUND: dict[str, Any] = {"model": "default", "prompt": "word1", "max_tokens": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_slow_model(ROOT / ".cache" / "slow_model")
    folder = tmp_path_factory.mktemp("guard")
    made = Server(folder, ["serve", str(model), *FLAGS], NIBBLE_API_KEY=KEY, **LIMITS)
    yield made.wait_until_ready()
    made.end()


class Watch:
    """Asks /health every 50 ms and looks at a running stream, for as long as the `with` lasts."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._over = threading.Event()
        self.health_s: list[float] = []
        self.statuses: set[int] = set()
        self.gaps_s: list[float] = []

    def __enter__(self) -> Watch:
        self._stream: Stream = self._server.stream(1900, key=KEY).wait_for(2)
        self._threads = [threading.Thread(target=work) for work in (self._ask, self._look)]
        for thread in self._threads:
            thread.start()
        time.sleep(0.3)
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(0.3)
        self._over.set()
        for thread in self._threads:
            thread.join(60)
        self._stream.hang_up()

    def check(self, record: Record, gap_s: float = GAP_S) -> None:
        record("longest_health_s", round(max(self.health_s), 3))
        record("longest_gap_s", round(max(self.gaps_s), 3))
        assert self.statuses == {200}
        assert len(self.health_s) > 2 and max(self.health_s) < with_neighbours(HEALTH_S), sorted(
            self.health_s
        )[-5:]
        assert max(self.gaps_s) < with_neighbours(gap_s), sorted(self.gaps_s)[-5:]

    def _ask(self) -> None:
        while not self._over.wait(0.05):
            began = time.monotonic()
            connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=60)
            with contextlib.closing(connection):
                connection.request("GET", "/health")
                response = connection.getresponse()
                response.read()
            self.statuses.add(response.status)
            self.health_s.append(time.monotonic() - began)

    def _look(self) -> None:
        moments, seen = [time.monotonic()], self._stream.chunks
        while not self._over.wait(0.01):
            if self._stream.chunks > seen:
                seen = self._stream.chunks
                moments.append(time.monotonic())
        self.gaps_s = [after - before for before, after in pairwise([*moments, time.monotonic()])]


def is_alive(server: Server) -> None:
    status, answer = server.ask(
        COMPLETIONS, {**SOUND, "max_tokens": 3, "ignore_eos": True}, key=KEY
    )
    assert status == 200 and answer["usage"]["completion_tokens"] == 3
    assert server.is_ready()


def send(server: Server, data: bytes, timeout_s: float = 60) -> int:
    """The status of the answer to these bytes; 0: closed without one."""
    with socket.create_connection(("127.0.0.1", server.port), timeout_s) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(data)
        answer = read_all(connection)
    return int(answer.split(b" ", 2)[1]) if answer else 0


def body(path: str, **fields: Any) -> bytes:
    return post(json.dumps({"model": "default", **fields}).encode(), path)


CHUNKED = (
    f"POST {COMPLETIONS} HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\nContent-Type:"
    " application/json\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
).encode()
# Made when they are sent: some have 100 MB, and every process of a test run reads this file.
HEAVY: dict[str, tuple[Callable[[], bytes], int]] = {
    "a million keys": (
        lambda: body(COMPLETIONS, **SOUND | {f"k{n}": 1 for n in range(10**6)}),
        400,
    ),
    "20,000 messages": (lambda: body(CHAT, messages=[USER] * 20_000, max_tokens=1), 400),
    "nesting": (lambda: post(b'{"prompt": ' + b"[" * 10**6), 400),
    "tokenize of 10 MB": (lambda: body("/tokenize", prompt="word1 " * 1_700_000), 400),
    "n of 16,384": (lambda: body(COMPLETIONS, prompt="word1", n=16_384, max_tokens=1), 400),
    "1024 prompts, n of 16": (
        lambda: body(COMPLETIONS, prompt=["word1"] * 1024, n=16, max_tokens=1),
        400,
    ),
    "log-probs of long prompts": (
        lambda: body(COMPLETIONS, prompt=["word1 " * 2000] * 50, max_tokens=1, prompt_logprobs=20),
        400,
    ),
    "log-probs of long answers": (
        lambda: body(COMPLETIONS, prompt="word1", n=16, max_tokens=2000, logprobs=20),
        400,
    ),
    "long stop strings": (lambda: body(COMPLETIONS, prompt="word1", stop=["x" * 10**6] * 4), 400),
    "bad words": (
        lambda: body(COMPLETIONS, prompt="word1", bad_words=[f"word{n}" for n in range(10**5)]),
        400,
    ),
    "a lone surrogate in bad_words": (
        lambda: post(json.dumps({**SOUND, "bad_words": ["\ud800"]}).encode()),
        400,
    ),
    "kv_transfer_params of a wrong type": (
        lambda: body(COMPLETIONS, prompt="word1", vllm_xargs={"kv_transfer_params": "x"}),
        400,
    ),
    "a million items": (lambda: body(COMPLETIONS, prompt=[1] * 10**6, max_tokens=1), 400),
    "one trailer of 100 MB": (lambda: CHUNKED + b"X: " + b"x" * 10**8, 431),
    "ten million trailers": (lambda: CHUNKED + b"a:b\r\n" * 10**7, 431),
    "log-probs of many answers": (
        lambda: body(COMPLETIONS, prompt=["word1"] * 1024, max_tokens=16, logprobs=20),
        400,
    ),
    "n of 16,384 as text": (
        lambda: body(COMPLETIONS, prompt="word1", n="16_384", max_tokens=1),
        400,
    ),
    "one header of 100 MB": (lambda: b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * 10**8, 431),
    "a million headers": (
        lambda: b"GET /health HTTP/1.1\r\n" + b"".join(b"a%d: b\r\n" % n for n in range(10**6)),
        431,
    ),
    "one header of 100 MB with the key": (
        lambda: (
            f"GET /health HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\nX-Long: ".encode()
            + b"x" * 10**8
        ),
        431,
    ),
}


# One of each way in which a request is refused; tests/unit/test_guard_*.py have the others at less
# cost.
FIRST = (
    "a million keys",
    "nesting",
    "log-probs of long prompts",
    "ten million trailers",
    "a million headers",
)


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in FIRST else pytest.mark.slow) for one in HEAVY]
)
def test_is_refused_while_others_are_served(
    server: Server, name: str, record_property: Record
) -> None:
    make, expected = HEAVY[name]
    data = make()
    with Watch(server) as watch:
        began = time.monotonic()
        status = send(server, data)
        record_property("answered_after_s", round(time.monotonic() - began, 3))
    assert status in (
        expected,
        0 if expected == 431 else expected,
    )  # 0: reset while 100 MB were being sent
    watch.check(record_property)
    is_alive(server)


# The most that the limits allow: accepted, or refused by vLLM, and still no stall.
ALLOWED: dict[str, Callable[[], bytes]] = {
    "19,000 keys": lambda: body(COMPLETIONS, **SOUND | {f"k{n}": 1 for n in range(19_000)}),
    "2048 messages": lambda: body(CHAT, messages=[USER] * 2048, max_tokens=1),
    "n of 1024": lambda: body(COMPLETIONS, prompt="word1", n=1024, max_tokens=1),
    "1024 prompts": lambda: body(COMPLETIONS, prompt=["word1"] * 1024, max_tokens=1),
    "log-probs of a prompt": lambda: body(
        COMPLETIONS, prompt="word1 " * 2000, max_tokens=1, prompt_logprobs=7
    ),
    "2048 messages of one part": lambda: body(
        CHAT,
        messages=[{"role": "user", "content": [{"type": "text", "text": "word1"}]}] * 2048,
        max_tokens=1,
    ),
    "260,000 token ids": lambda: body(
        COMPLETIONS, prompt=[1] * 260_000, truncate_prompt_tokens=5, max_tokens=1
    ),
    "4 MB of text": lambda: body(
        COMPLETIONS, prompt="word1 " * 690_000, truncate_prompt_tokens=5, max_tokens=1
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALLOWED)
def test_the_most_that_is_allowed_stalls_no_other_request(
    server: Server, name: str, record_property: Record
) -> None:
    if (
        "log-probs" in name
    ):  # on a CPU the engine compiles what they need when they are first asked for
        send(server, ALLOWED[name](), 120)
    with Watch(server) as watch:
        status = send(server, ALLOWED[name](), 120)
    assert status in (200, 400)
    # The engine's own step takes seconds for log-probs of a prompt on a CPU; the API server does
    # not.
    watch.check(record_property, gap_s=60 if "log-probs" in name else GAP_S)
    is_alive(server)


def api_server_bytes(server: Server) -> int:
    """Resident memory of the API server, in bytes."""
    assert server.engine_pid
    text = Path(f"/proc/{server.engine_pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) << 10


@pytest.mark.parametrize(
    "chunked",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["declared", "chunked"],
)
def test_a_body_of_1_gb_is_refused_and_not_kept(
    server: Server, chunked: bool, record_property: Record
) -> None:
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {1 << 30}"
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\nContent-Type:"
        f" application/json\r\n{length}\r\n\r\n"
    )
    piece = b"%x\r\n%s\r\n" % (1 << 20, b" " * (1 << 20)) if chunked else b" " * (1 << 20)
    before = api_server_bytes(server)
    with (
        Watch(server) as watch,
        socket.create_connection(("127.0.0.1", server.port), 60) as connection,
    ):
        connection.sendall(head.encode())
        answer, most = b"", 0
        with contextlib.suppress(OSError):
            for _ in range(1024):
                connection.sendall(piece)
                most = max(most, api_server_bytes(server))
        with contextlib.suppress(OSError):
            answer = connection.recv(4096)
    record_property("more_memory_mib", (most - before) >> 20)
    assert not answer or answer.startswith(b"HTTP/1.1 413")
    assert most - before < 200 << 20
    watch.check(record_property)
    is_alive(server)


def test_slow_heads_slow_bodies_and_idle_connections_are_closed(
    server: Server, record_property: Record
) -> None:
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\nContent-Type:"
        " application/json\r\n"
    )
    # The idle ones first: beyond 2048 of one address the oldest give way to those that follow.
    starts = (
        [b""] * 3000 + [head.encode()] * 64 + [f"{head}Content-Length: 100\r\n\r\n{{".encode()] * 64
    )
    with Watch(server) as watch, contextlib.ExitStack() as opened:
        began = time.monotonic()
        connections = []
        for start in starts:
            connection = opened.enter_context(
                socket.create_connection(("127.0.0.1", server.port), 10)
            )
            connection.sendall(start)
            connections.append(connection)
        record_property("opened_after_s", round(time.monotonic() - began, 2))
        began = time.monotonic()
        answers = []
        for connection in connections:
            connection.settimeout(10)
            answers.append(read_all(connection)[:12])
        took_s = time.monotonic() - began
    record_property("closed_after_s", round(took_s, 2))
    assert took_s < 3 + 5
    assert set(answers[:3000]) == {b""} and set(answers[3000:]) == {b"HTTP/1.1 408"}
    watch.check(record_property)
    is_alive(server)


@pytest.mark.slow
def test_20_heavy_requests_at_once_stall_no_other_request(
    server: Server, record_property: Record
) -> None:
    data = ALLOWED["2048 messages"]()
    with Watch(server) as watch:
        threads = [threading.Thread(target=send, args=(server, data, 300)) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    watch.check(record_property)
    is_alive(server)

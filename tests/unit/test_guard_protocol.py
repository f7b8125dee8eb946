"""Decisions about connections that a real socket would leave to chance: what comes in one piece,
and when.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from nibble.engine.gate.state import GateState
from nibble.engine.guard import connections as connections_module
from nibble.engine.guard.connections import Connections
from nibble.engine.guard.limits import RequestLimits
from nibble.engine.guard.protocol import GuardedProtocol

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


class Written(asyncio.Transport):
    """In the place of a socket, so that a test decides what comes in one piece."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1)})
        self.data = b""

    def write(self, data: Any) -> None:
        self.data += data

    def is_closing(self) -> bool:
        return False

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


async def answer_200(scope: Any, receive: Any, send: Any) -> None:
    while (await receive())["more_body"]:
        pass
    headers = [(b"content-length", b"0"), (b"x-headers", b"%d" % len(scope["headers"]))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body"})


def answers_to(*pieces: bytes) -> bytes:
    """What is written to a connection on which these pieces arrive."""

    async def run() -> bytes:
        config = uvicorn.Config(
            answer_200, access_log=False, lifespan="off", http=HttpToolsProtocol
        )
        config.h11_max_incomplete_event_size = 65536
        config.h11_max_header_count = 128  # type: ignore[attr-defined]
        config.load()
        protocol, transport = (
            GuardedProtocol(config, ServerState(), {}, guard=made_connections()),
            Written(),
        )
        protocol.connection_made(transport)
        for piece in pieces:
            protocol.data_received(piece)
            await asyncio.sleep(0.02)
        return transport.data

    return asyncio.run(run())


def made_connections(state: Any = None, **environ: str) -> Connections:
    limits = RequestLimits.from_environ(
        {f"NIBBLE_{name}": value for name, value in environ.items()}
    )
    return Connections(limits, state or GateState.open(""))


def test_half_a_head_behind_a_large_body_is_no_large_head() -> None:
    body = b" " * 99_998 + b"}"
    found = answers_to(HEAD + b"Content-Length: 100000\r\n\r\n{", body + HEALTH[:-2], HEALTH[-2:])
    assert found.count(b"HTTP/1.1 200") == 2


def test_trailers_do_not_become_headers() -> None:
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    assert b"x-headers: 2" in answers_to(chunked, b"2\r\n{}\r\n0\r\nX-API-Key: x\r\n\r\n")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"a: b\r\n" * 125, b"200"),
        (b"a: b\r\n" * 128, b"431"),
        (b"a: %s\r\n" % (b"x" * 60_000), b"200"),
        (b"a: %s\r\n" % (b"x" * 66_000), b"431"),
    ],
    ids=["127", "130", "60 KB", "66 KB"],
)
def test_headers_that_come_whole_are_counted(headers: bytes, status: bytes) -> None:
    found = answers_to(HEAD + headers + b"Content-Length: 2\r\n\r\n{}")
    assert found.split(b" ", 2)[1] == status
    assert status == b"200" or b"NIBBLE_MAX_HEADER" in json.dumps(found.decode()).encode()


class Connection:
    """As much of a GuardedProtocol as Connections uses."""

    def __init__(self, address: str = "", deadline: float = 0.0, waits_since: float = 0.0) -> None:
        self.address, self.deadline, self.waits_since = address, deadline, waits_since
        self.transport = self
        self.expired: list[str] = []
        self.fails = self.aborted = False

    def expire(self, why: str) -> None:
        self.expired.append(why)
        if self.fails:
            raise RuntimeError("no sweep is prepared for this")

    def abort(self) -> None:
        self.aborted = True


def swept(
    found: Connections, connection: Connection, last_sweep_age_s: float, seconds: float = 0.0
) -> list[str]:
    """Why the connection expired in a sweep and those of the next seconds."""

    async def run() -> list[str]:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        found.wait_for_request(connection)  # type: ignore[arg-type]
        found._last_sweep = loop.time() - last_sweep_age_s
        connection.waits_since += loop.time()
        with contextlib.suppress(RuntimeError):
            found.sweep()
        await asyncio.sleep(seconds)
        return connection.expired

    return asyncio.run(run())


def test_a_sweep_that_fails_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "_SWEEP_S", 0.05)
    odd = Connection()
    odd.fails = True
    assert len(swept(made_connections(), odd, 0.0, seconds=0.3)) >= 2


def test_what_arrived_in_a_standstill_is_read_before_a_sweep() -> None:
    assert swept(made_connections(), Connection(), 5.0) == []
    assert swept(made_connections(), Connection(), 0.2) == ["late"]


def test_a_drain_expires_what_has_waited_for_a_moment() -> None:
    class Draining:
        def get(self) -> tuple[str, str]:
            return "draining", "drain"

    for_ever = float("inf")
    assert swept(made_connections(Draining()), Connection("", for_ever, -1.0), 0.0) == ["draining"]
    assert swept(made_connections(Draining()), Connection("", for_ever, -0.1), 0.0) == []
    assert swept(made_connections(), Connection("", for_ever, -1.0), 0.0) == []


def test_all_connections_together_have_a_limit() -> None:
    found = made_connections(MAX_CONNECTIONS="8", MAX_CONNECTIONS_PER_ADDRESS="4")
    first = [Connection(address) for address in "aaaabbbb"]
    assert all(found.add(one) for one in first)  # type: ignore[arg-type]
    assert found.add(Connection("c"))  # type: ignore[arg-type]
    assert [one.aborted for one in first] == [True, *[False] * 7]
    found.remove(first[0])  # type: ignore[arg-type]
    for one in first[1:]:
        found.has_request(one)  # type: ignore[arg-type]
    assert found.add(Connection("d"))  # type: ignore[arg-type]  # c gives way
    full = made_connections(MAX_CONNECTIONS="8")
    for one in (busy := [Connection(address) for address in "abcdefgh"]):
        assert full.add(one)  # type: ignore[arg-type]
        full.has_request(one)  # type: ignore[arg-type]
    assert not full.add(Connection("i"))  # type: ignore[arg-type]
    assert not any(one.aborted for one in busy)

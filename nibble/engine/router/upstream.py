"""HTTP connections from the router to one engine, kept open between requests.

httptools parses the answers, as uvicorn does with requests: a general client costs a request more
than the whole routing may.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import httptools

Header = tuple[bytes, bytes]
Message = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]

ADDRESS = "127.0.0.1"
# uvicorn closes a connection that was idle for 5 s (vllm 0.32 VLLM_HTTP_TIMEOUT_KEEP_ALIVE).
IDLE_S = 4.0
_PAUSE_BYTES, _RESUME_BYTES = 1 << 18, 1 << 16
_OF_A_CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"expect")
)
_REPLACED = _OF_A_CONNECTION | {b"content-length", b"x-nibble-internal"}


class EngineGone(Exception):
    """The engine closed the connection before the end of its answer."""

    def __init__(self, had_started: bool) -> None:
        super().__init__("the engine ended")
        self.had_started = had_started


class ClientGone(Exception):
    """The client disconnected."""


class Upstream:
    """Connections to the engine at `port`."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._idle: list[_Connection] = []

    async def forward(
        self,
        scope: Message,
        body: bytes,
        send: Send,
        gone: asyncio.Future[Any] | None = None,
    ) -> None:
        """Send the request, and its answer to `send`. Raises EngineGone, and ClientGone once `gone`
        is done.
        """
        request = request_bytes(scope, len(body))
        while True:
            connection, is_new = await self._connection()
            try:
                await connection.exchange(request, body, send, gone)
            except EngineGone as error:
                # It closed an idle connection while this request was on its way.
                if is_new or error.had_started or connection.has_received:
                    raise
                continue
            finally:
                if connection.is_reusable:
                    self._idle.append(connection)
                else:
                    connection.close()
            return

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _connection(self) -> tuple[_Connection, bool]:
        now = time.monotonic()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable and now - connection.idle_since < IDLE_S:
                return connection, False
            connection.close()
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, ADDRESS, self.port)
        except OSError:
            raise EngineGone(False) from None
        return connection, True


def request_bytes(scope: Message, body_bytes: int) -> bytes:
    """The head of the request to the engine, with the client's headers."""
    path = scope.get("raw_path") or scope["path"].encode()
    if query := scope.get("query_string"):
        path = b"%s?%s" % (path, query)
    lines = [b"%s %s HTTP/1.1" % (scope["method"].encode(), path)]
    lines += [b"%s: %s" % pair for pair in scope["headers"] if pair[0] not in _REPLACED]
    if body_bytes or scope["method"] == "POST":
        lines.append(b"content-length: %d" % body_bytes)
    return b"\r\n".join(lines) + b"\r\n\r\n"


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        self._parser: Any = None
        self._transport: Any = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._headers: list[Header] = []
        self._start: Message | None = None
        self._pieces: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_paused = self._is_closed = False
        self._is_over = True
        self._client_left = self._keeps_alive = False
        self.has_received = False
        self.is_reusable = False
        self.idle_since = 0.0

    async def exchange(
        self, request: bytes, body: bytes, send: Send, gone: asyncio.Future[Any] | None
    ) -> None:
        """One request and its whole answer."""
        self._begin(request, body)
        if gone is not None:
            gone.add_done_callback(self._on_client_gone)
        has_started = is_sent = False
        try:
            while not is_sent:
                if self._start is not None:
                    has_started, start, self._start = True, self._start, None
                    await send(start)
                elif has_started and (self._pieces or self._is_over):
                    message = self._next_body()
                    is_sent = not message["more_body"]
                    await send(message)
                else:
                    await self._wait(has_started)
            self.is_reusable = self._keeps_alive and not self._is_closed
            self.idle_since = time.monotonic()
        finally:
            if gone is not None:
                gone.remove_done_callback(self._on_client_gone)

    def close(self) -> None:
        """Close it; the engine then aborts the request."""
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    # --- one exchange ---

    def _begin(self, request: bytes, body: bytes) -> None:
        self.is_reusable = self._is_over = self.has_received = False
        self._start = None
        self._pieces.clear()
        self._parser = httptools.HttpResponseParser(self)
        self._client_left = False
        if len(body) < _RESUME_BYTES:
            self._transport.write(request + body)
        else:
            self._transport.writelines((request, body))

    def _next_body(self) -> Message:
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._waiting_bytes = 0
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        return {"type": "http.response.body", "body": body, "more_body": not self._is_over}

    async def _wait(self, has_started: bool) -> None:
        if self._client_left:
            raise ClientGone
        if self._is_closed:
            raise EngineGone(has_started)
        self._waiter = self._loop.create_future()
        await self._waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _on_client_gone(self, _: object) -> None:
        self._client_left = True
        self.close()
        self._wake()

    # --- asyncio's side ---

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.has_received = True
        if self._is_over:  # bytes after an answer: no further request may use this connection
            return self.close()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
        if self._waiting_bytes > _PAUSE_BYTES and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        return self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable, self._is_closed = False, True
        self._wake()

    # --- httptools' side ---

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header of the answer."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is whole."""
        kept = [pair for pair in self._headers if pair[0] not in _OF_A_CONNECTION]
        status = self._parser.get_status_code()
        self._headers = []
        if status >= 200:
            self._start = {"type": "http.response.start", "status": status, "headers": kept}

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._pieces.append(body)
        self._waiting_bytes += len(body)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        self._is_over = True
        self._keeps_alive = self._parser.should_keep_alive()


async def read(upstream: Upstream, path: str, headers: Iterable[Header]) -> tuple[int, bytes]:
    """(status, body) of a GET. Raises EngineGone."""
    status, pieces = 0, []

    async def collect(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            pieces.append(message["body"])

    scope = {"method": "GET", "path": path, "headers": list(headers)}
    await upstream.forward(scope, b"", collect)
    return status, b"".join(pieces)

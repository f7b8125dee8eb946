"""Reads a request's body within the limits, checks it, and passes it to vLLM in one piece."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from nibble.engine.guard.json_scan import JsonScan
from nibble.engine.guard.limits import RequestLimits
from nibble.engine.guard.refusal import Refused

Receive = Callable[[], Awaitable[dict[str, Any]]]
Turn = Callable[[], Awaitable[None]]
Header = tuple[bytes, bytes]

# The scan of a piece lets the event loop run after each slice.
_SLICE_BYTES = 1 << 16
# Bodies of at most this size are accepted even when other bodies fill the buffer: with the greatest
# number of connections they take 256 MiB together.
SMALL_BODY_BYTES = 1 << 16


class Disconnected(Exception):
    """The connection ended before the whole body arrived."""


class Bodies:
    """Counts the bytes of all bodies in one API process, for the limit `max_buffered_bytes`."""

    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self.held_bytes = 0


class Held:
    """Counts the body of one request until the end of its answer. A context manager.

    starlette keeps the body in memory for the same time.
    """

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._bytes = 0

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self._bodies.held_bytes -= self._bytes

    async def read(self, declared_bytes: int, receive: Receive, scan: JsonScan | None) -> bytes:
        """The whole body.

        declared_bytes: from the header, 0 if unknown; scan: checks JSON while it arrives.
        Raises Refused as soon as a limit is exceeded, and Disconnected.
        """
        self._check_size(declared_bytes)
        pieces: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise Disconnected
            piece = message.get("body", b"")
            self._bytes += len(piece)
            self._bodies.held_bytes += len(piece)
            self._check_size(self._bytes)
            if scan is not None and piece:
                await _scan(scan, piece)
            pieces.append(piece)
            if not message.get("more_body", False):
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _check_size(self, size: int) -> None:
        limits = self._bodies.limits
        if size > limits.max_body_bytes:
            raise Refused(
                413,
                f"The body is larger than {limits.max_body_bytes} bytes (NIBBLE_MAX_BODY_BYTES).",
            )
        if size > SMALL_BODY_BYTES and self._bodies.held_bytes > limits.max_buffered_bytes:
            raise Refused(503, "The server is reading too many request bodies. Try again later.")


async def _scan(scan: JsonScan, piece: bytes) -> None:
    for start in range(0, len(piece), _SLICE_BYTES):
        if start:
            await asyncio.sleep(0)
        if problem := scan.feed(piece[start : start + _SLICE_BYTES]):
            raise Refused(400, problem)


def parse(body: bytes) -> Any:
    """The JSON value of a body, by RFC 8259: UTF-8, no byte order mark, NaN or lone surrogates.

    vLLM's json.loads accepts UTF-16, NaN and lone surrogates too, and later fails with status 500.
    Both parsers read an accepted body alike: the last of equal keys counts, and integers have any
    size. Raises Refused.
    """
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        reason = str(error)[:200]
        raise Refused(400, f"The body is not valid JSON in UTF-8: {reason}") from None


def with_field(body: bytes, name: str, value: int) -> bytes:
    """The JSON object `body` with one more field, which replaces an equal key before it."""
    return b'%s,"%s":%d}' % (body.rstrip()[:-1], name.encode(), value)


def replayed(body: bytes, receive: Receive, turn: Turn | None = None) -> Receive:
    """A `receive` that returns the body in one message, then the messages of `receive`.

    turn: awaited before the body is returned.
    """
    waiting: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> dict[str, Any]:
        if not waiting:
            return await receive()
        if turn is not None:
            await turn()
        return waiting.pop()

    return receive_again

"""Reads a request's body within its limits, checks it, and hands it to vLLM in one piece."""

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

# The event loop answers others after each slice.
_SLICE_BYTES = 1 << 16
# Not refused where other bodies take all the room: as many as there may be connections take 256
# MiB.
SMALL_BODY_BYTES = 1 << 16


class Disconnected(Exception):
    """The client went away, or was sent away, before its body was whole."""


class Bodies:
    """The bodies of one API process; all that are held together stay below `max_buffered_bytes`."""

    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self.held_bytes = 0


class Held:
    """The body of one request, from its first byte to the end of its answer: starlette keeps it
    for as long. A context.
    """

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._bytes = 0

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self._bodies.held_bytes -= self._bytes

    async def read(self, declared_bytes: int, receive: Receive, scan: JsonScan | None) -> bytes:
        """The whole body. Raises Refused over a limit, before more is read, and Disconnected."""
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
    """The JSON value, with the strictness of RFC 8259: UTF-8 without byte order mark, no NaN, no
    lone surrogates.

    vLLM's json.loads also takes UTF-16, NaN and lone surrogates, and fails on them later with
    status 500. What both take means the same to both: the last of equal keys counts, whole numbers
    keep their size.
    """
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        reason = str(error)[:200]
        raise Refused(400, f"The body is not valid JSON in UTF-8: {reason}") from None


def with_field(body: bytes, name: str, value: int) -> bytes:
    """The object with one more field, which replaces an equal one before it: parsers keep the
    last.
    """
    return b'%s,"%s":%d}' % (body.rstrip()[:-1], name.encode(), value)


def replayed(body: bytes, receive: Receive, turn: Turn | None = None) -> Receive:
    """A `receive` that gives the body in one message, when its `turn` has come, and then
    whatever `receive` gives.
    """
    waiting: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> dict[str, Any]:
        if not waiting:
            return await receive()
        if turn is not None:
            await turn()
        return waiting.pop()

    return receive_again

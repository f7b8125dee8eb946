"""A request's body: read within its limits, checked while it arrives, handed to vLLM in one piece."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from nibble.guard.json_scan import JsonScan
from nibble.guard.limits import RequestLimits
from nibble.guard.refusal import Refused

Receive = Callable[[], Awaitable[dict[str, Any]]]
Turn = Callable[[], Awaitable[None]]
Header = tuple[bytes, bytes]

# The event loop answers others after each slice.
_SLICE_BYTES = 1 << 16


class Disconnected(Exception):
    """The client went away, or was sent away, before its body was whole."""


class BodyReader:
    """Reads the bodies of one API process; all that are being read together stay below `max_buffered_bytes`."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self.buffered_bytes = 0

    async def read(self, declared_bytes: int, receive: Receive, scan: JsonScan | None) -> bytes:
        """The whole body. Raises Refused over a limit, before more is read, and Disconnected."""
        self._check_size(declared_bytes)
        pieces: list[bytes] = []
        size = 0
        try:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise Disconnected
                piece = message.get("body", b"")
                size += len(piece)
                self.buffered_bytes += len(piece)
                self._check_size(size)
                if scan is not None and piece:
                    await _scan(scan, piece)
                pieces.append(piece)
                if not message.get("more_body", False):
                    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        finally:
            self.buffered_bytes -= size

    def _check_size(self, size: int) -> None:
        limits = self._limits
        if size > limits.max_body_bytes:
            raise Refused(
                413, f"The body is larger than {limits.max_body_bytes} bytes (NIBBLE_MAX_BODY_BYTES)."
            )
        if self.buffered_bytes > limits.max_buffered_bytes:
            raise Refused(503, "The server reads too many bodies at this time; try again later.")


async def _scan(scan: JsonScan, piece: bytes) -> None:
    for start in range(0, len(piece), _SLICE_BYTES):
        if start:
            await asyncio.sleep(0)
        if problem := scan.feed(piece[start : start + _SLICE_BYTES]):
            raise Refused(400, problem)


def parse(body: bytes) -> Any:
    """The JSON value, with the strictness of RFC 8259: UTF-8 without byte order mark, no NaN, no lone surrogates.

    vLLM's json.loads also takes UTF-16, NaN and lone surrogates, and fails on them later with status 500. What
    both take means the same to both: the last of equal keys counts, whole numbers keep their size.
    """
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        reason = str(error)[:200]
        raise Refused(400, f"The body is not valid JSON in UTF-8: {reason}") from None


def with_field(body: bytes, name: str, value: int) -> bytes:
    """The object with one more field, which replaces an equal one before it: parsers keep the last."""
    return b'%s,"%s":%d}' % (body.rstrip()[:-1], name.encode(), value)


def replayed(body: bytes, receive: Receive, turn: Turn | None = None) -> Receive:
    """A `receive` that gives the body in one message, when its `turn` has come, and then whatever `receive` gives."""
    waiting: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> dict[str, Any]:
        if not waiting:
            return await receive()
        if turn is not None:
            await turn()
        return waiting.pop()

    return receive_again

"""Shortens vLLM's error answers, which repeat the request: 1.3 MB for a request of 1 MB."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

Message = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]

MAX_ERROR_BYTES = 8192
MAX_MESSAGE_CHARS = 2048


def with_short_errors(send: Send) -> Send:
    """An ASGI `send` that collects errors (status 400 and above) and shortens them.

    It passes other answers on piece by piece.
    """
    start: Message | None = None
    pieces: list[bytes] = []

    async def send_short(message: Message) -> None:
        nonlocal start
        if message["type"] == "http.response.start" and message["status"] >= 400:
            start = message
            return
        if start is None:
            return await send(message)
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            body = b"".join(pieces)
            if len(body) > MAX_ERROR_BYTES:
                body = shortened(body)
                start["headers"] = [*_without_length(start.get("headers", ())), _length(body)]
            await send(start)
            await send({"type": "http.response.body", "body": body})

    return send_short


def shortened(body: bytes) -> bytes:
    """A JSON error in OpenAI's shape with the beginning of the message.

    A body of another shape becomes the message.
    """
    try:
        error = dict(msgspec.json.decode(body)["error"])
        error = {name: _cut(value) for name, value in error.items()}
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError):
        error = {"message": _cut(body.decode(errors="replace"))}
    return json.dumps({"error": error}).encode()


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_MESSAGE_CHARS:
        return f"{value[:MAX_MESSAGE_CHARS]}... [{len(value) - MAX_MESSAGE_CHARS} characters cut]"
    return value if isinstance(value, str | int | float | None) else _cut(str(value))


def _without_length(headers: Any) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower() != b"content-length"]


def _length(body: bytes) -> tuple[bytes, bytes]:
    return b"content-length", str(len(body)).encode()

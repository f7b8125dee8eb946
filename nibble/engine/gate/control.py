"""Asks the supervisor's control port: for the status page's data and nibble's metrics."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

METRICS_PATH = "/metrics"
_TIMEOUT_S = 5.0
_METRICS_TIMEOUT_S = 0.5  # a scrape does not wait for nibble
_MAX_BYTES = 8 << 20

Send = Callable[[dict[str, Any]], Awaitable[None]]


async def ask_control(port: str, path: str, timeout_s: float = _TIMEOUT_S) -> bytes | None:
    """The body of a 200 from the control port; None without one."""
    with contextlib.suppress(OSError, ValueError, TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
                await writer.drain()
                answer = await _read_all(reader)
            finally:
                writer.close()
            head, _, body = answer.partition(b"\r\n\r\n")
            return body if head.startswith(b"HTTP/1.1 200 ") else None
    return None


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    """Until the control port closes; it does after each answer."""
    found = bytearray()
    while piece := await reader.read(1 << 16):
        found += piece
        if len(found) > _MAX_BYTES:
            raise ValueError("too long")
    return bytes(found)


async def with_own_metrics(port: str, send: Send) -> Send:
    """A `send` that puts nibble's metrics before vLLM's.

    Before, because OpenMetrics ends with a line `# EOF`.
    """
    text = await ask_control(port, METRICS_PATH, _METRICS_TIMEOUT_S) or b""
    is_first = True

    async def sender(message: dict[str, Any]) -> None:
        nonlocal text, is_first
        if message["type"] == "http.response.start":
            if message["status"] != 200:
                text = b""
            headers = [
                (name, str(int(value) + len(text)).encode() if name == b"content-length" else value)
                for name, value in message["headers"]
            ]
            message = {**message, "headers": headers}
        elif message["type"] == "http.response.body" and is_first:
            is_first = False
            message = {**message, "body": text + message.get("body", b"")}
        await send(message)

    return sender

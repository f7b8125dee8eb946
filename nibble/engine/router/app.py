"""The ASGI application behind the gate of several models: sends each request to its engine.

The engine's own gate checks the body. This one reads only the field `model`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from nibble.engine.gate.asgi import (
    METRICS_TYPE,
    NOT_FOUND,
    Answer,
    error_answer,
    refuse_websocket,
    send_http,
)
from nibble.engine.gate.control import METRICS_PATH
from nibble.engine.gate.routes import HEALTH_PATH
from nibble.engine.guard.body import Bodies, Disconnected, Held
from nibble.engine.guard.limits import RequestLimits
from nibble.engine.guard.refusal import Refused
from nibble.engine.router.merge_metrics import merge
from nibble.engine.router.model_field import model_of
from nibble.engine.router.table import Entry, Table
from nibble.engine.router.upstream import ClientGone, EngineGone, Header, Upstream, read

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_METRICS_TIMEOUT_S = 2.0
_RETRY = ((b"retry-after", b"5"),)
_SHOWN_NAMES = 50


class Router:
    """Sends requests to the engines of `table`. `version` is vLLM's."""

    def __init__(self, table: Table, limits: RequestLimits, version: str) -> None:
        self._table, self._bodies, self._version = table, Bodies(limits), version

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await _lifespan(receive, send)
        if scope["type"] == "websocket":  # names its model only after the handshake
            return await refuse_websocket(scope, receive, send, NOT_FOUND)
        own = await self._own_answer(scope)
        if own is not None:
            return await send_http(send, own)
        try:
            await self._route(scope, receive, send)
        except Refused as refused:
            await send_http(send, _answer_of(refused))
        except (Disconnected, ClientGone):
            pass
        return None

    async def _own_answer(self, scope: Message) -> Answer | None:
        """The answer to a request that no single engine can answer."""
        path, method = scope["path"], scope["method"]
        if method != "GET":
            return None
        if path == HEALTH_PATH:
            return Answer(200, b"")
        if path == "/v1/models":
            return Answer(200, json.dumps(describe(self._table)).encode())
        if path == "/version":
            return Answer(200, json.dumps({"version": self._version}).encode())
        if path == METRICS_PATH:
            return Answer(200, (await self._metrics(scope)).encode(), (), METRICS_TYPE)
        return None

    async def _route(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if scope["method"] == "POST" and not path.endswith("/cancel"):
            return await self._to_model(scope, receive, send)
        ready = [entry for entry in self._table if entry.state == "ready"]
        if not ready:
            raise Refused(503, "No model is loaded.")
        if scope["method"] == "OPTIONS":
            ready = ready[:1]
        return await _first_that_knows(ready, scope, send)

    async def _to_model(self, scope: Message, receive: Receive, send: Send) -> None:
        content_type, declared_bytes = _body_of(scope["headers"])
        with Held(self._bodies) as held:
            body = await held.read(declared_bytes, receive, None)
            entry = self._table.find(name := model_of(body, content_type))
            if entry is None:
                return await send_http(send, unknown_model(str(name), self._table))
            gone = asyncio.ensure_future(receive())
            try:
                if await self._table.enter(entry, gone):
                    await self._to_engine(entry, scope, body, send, gone)
            finally:
                gone.cancel()
        return None

    async def _to_engine(
        self,
        entry: Entry,
        scope: Message,
        body: bytes,
        send: Send,
        gone: asyncio.Future[Any],
    ) -> None:
        try:
            assert entry.upstream is not None
            await entry.upstream.forward(scope, body, send, gone)
        except EngineGone as error:
            if error.had_started:
                raise  # the client sees its connection end inside the answer
            what = f"The engine of {entry.model} ended before it answered."
            await send_http(send, error_answer(503, "ServiceUnavailableError", what, _RETRY))
        finally:
            self._table.leave(entry)

    async def _metrics(self, scope: Message) -> str:
        kept = [pair for pair in scope["headers"] if pair[0] in (b"authorization", b"x-api-key")]
        ready = [entry for entry in self._table if entry.state == "ready" and entry.upstream]
        texts = await asyncio.gather(
            *(_metrics_of(entry.upstream, kept) for entry in ready if entry.upstream)
        )
        return merge({one.model: text for one, text in zip(ready, texts, strict=True) if text})


async def _first_that_knows(entries: list[Entry], scope: Message, send: Send) -> None:
    """Responses by id: only the engine that made one knows it. The last 404 is the answer."""
    for number, entry in enumerate(entries):
        is_last = number == len(entries) - 1
        assert entry.upstream is not None
        answer = send if is_last else _Unless404(send)
        try:
            await entry.upstream.forward(scope, b"", answer)
        except EngineGone:
            if is_last:
                raise Refused(503, f"The engine of {entry.model} ended.") from None
            continue
        if not isinstance(answer, _Unless404) or not answer.was_404:
            return


class _Unless404:
    """A `send` that drops an answer of status 404."""

    def __init__(self, send: Send) -> None:
        self._send, self.was_404 = send, False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.was_404 = message["status"] == 404
        if not self.was_404:
            await self._send(message)


async def _metrics_of(upstream: Upstream, headers: list[Header]) -> str:
    try:
        async with asyncio.timeout(_METRICS_TIMEOUT_S):
            status, body = await read(upstream, METRICS_PATH, headers)
    except (EngineGone, TimeoutError):
        return ""
    return body.decode(errors="replace") if status == 200 else ""


def describe(table: Table) -> dict[str, Any]:
    """/v1/models: every name, with its model and state."""
    names = [(name, table.find(name)) for name in table.known_names()]
    listed = [
        {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "nibble",
            "root": entry.model,
            "state": entry.state,
        }
        for name, entry in names
        if entry is not None
    ]
    return {"object": "list", "data": listed}


def unknown_model(name: str, table: Table) -> Answer:
    """404 with the names that this server has."""
    known = table.known_names()
    more = f" and {len(known) - _SHOWN_NAMES} more" if len(known) > _SHOWN_NAMES else ""
    shown = ", ".join(known[:_SHOWN_NAMES]) + more
    what = f"The model `{name[:200]}` does not exist. This server has: {shown}."
    return error_answer(404, "NotFoundError", what)


def _answer_of(refused: Refused) -> Answer:
    headers = _RETRY if refused.status == 503 else ()
    return error_answer(refused.status, refused.kind, str(refused), headers)


def _body_of(headers: list[Header]) -> tuple[bytes, int]:
    """(content type, declared bytes of the body, 0 if unknown)."""
    content_type, declared_bytes = b"", 0
    for name, value in headers:
        if name == b"content-type" and not content_type:
            content_type = value.strip()
        elif name == b"content-length" and value.isdigit():
            declared_bytes = int(value[:20])
    return content_type, declared_bytes


async def _lifespan(receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})

"""The door of the vLLM server: readiness, key and route list, checked before vLLM sees a request.

Given to vLLM as `--middleware nibble.engine.gate.asgi.Gate`; vLLM 0.32 adds it last and so
outermost (vllm/entrypoints/serve/middleware/register.py:65). It runs inside every API process and
reads:

NIBBLE_API_KEY        the key; empty or absent: not required
NIBBLE_GATE_STATE     path of the supervisor's state file (state.py); absent: the server stays
                      "starting"
NIBBLE_GATE_INTERNAL  random per start; the supervisor's warm-up requests carry it in
                      `x-nibble-internal`

The gate checks only the start of a request. A request admitted before a drain runs to its end.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from nibble.engine.gate.routes import (
    OPEN_METHODS,
    OPEN_PATHS,
    READY_PATH,
    WEBSOCKET,
    allowed_methods,
    is_canonical,
    router_path,
)
from nibble.engine.gate.state import GateState, State
from nibble.engine.guard.answers import with_short_errors
from nibble.engine.guard.body import Disconnected
from nibble.engine.guard.connections import guard_connections
from nibble.engine.guard.protocol import MissingAttribute
from nibble.engine.guard.refusal import Refused, error_body
from nibble.engine.guard.request_guard import RequestGuard

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]

INTERNAL_HEADER = b"x-nibble-internal"
# Starting: the next phase may be the last. Draining: this process ends, and the one that follows it
# needs its start-up time. Paused: as long as a long answer takes, for what runs has to end first.
RETRY_AFTER_SECONDS: dict[State, int] = {"starting": 5, "ready": 1, "draining": 30, "paused": 10}


@dataclass(frozen=True, slots=True)
class Answer:
    """What the gate says itself instead of passing a request on: status, JSON body, extra
    headers.
    """

    status: int
    body: bytes
    headers: tuple[Header, ...] = ()


@dataclass(frozen=True, slots=True)
class Caller:
    """What a request proved: it has the key (or none is required), or it comes from nibble's
    supervisor.
    """

    authorised: bool
    internal: bool


def error_answer(
    status: int, kind: str, message: str, headers: tuple[Header, ...] = (), **extra: str
) -> Answer:
    """An error of the gate itself; `extra` stands beside its message."""
    return Answer(status, error_body(status, kind, message, **extra), headers)


UNAUTHORISED = error_answer(
    401,
    "AuthenticationError",
    "This server needs its API key: send 'Authorization: Bearer KEY' (or 'x-api-key: KEY').",
    ((b"www-authenticate", b"Bearer"),),
)
NOT_FOUND = error_answer(
    404, "RouteNotListedError", "This route does not exist here (docs/security.md lists them)."
)


def judge(
    verb: str, path: str, canonical: bool, caller: Caller, state: State, phase: str
) -> Answer | None:
    """The gate's decision; None lets the request pass.

    `verb` is the HTTP method or WEBSOCKET, `path` the decoded path as the router sees it. The order
    matters: without the key a client learns neither the routes nor what the server is doing, beyond
    what the two open paths say.
    """
    is_open = canonical and path in OPEN_PATHS and verb in OPEN_METHODS
    if not (is_open or caller.authorised or caller.internal):
        return UNAUTHORISED
    methods = allowed_methods(path) if canonical else None
    if methods is None:
        return NOT_FOUND
    if verb not in methods:
        return _wrong_method(verb, methods)
    if path == READY_PATH:
        return _readiness(state, phase)
    if state != "ready" and not caller.internal:
        return _unavailable(state, phase)
    return None


def _wrong_method(verb: str, methods: frozenset[str]) -> Answer:
    if verb == WEBSOCKET or WEBSOCKET in methods:
        return NOT_FOUND
    allow = ", ".join(sorted(methods))
    return error_answer(
        405,
        "MethodNotAllowedError",
        f"Method not allowed; this route takes {allow}.",
        ((b"allow", allow.encode()),),
    )


def _readiness(state: State, phase: str) -> Answer:
    body = json.dumps({"state": state, "phase": phase}).encode()
    return Answer(200, body) if state == "ready" else Answer(503, body, _retry_headers(state))


def _unavailable(state: State, phase: str) -> Answer:
    message = f"The server is {state}" + (f" (phase: {phase})." if phase else ".")
    if state == "paused":
        message = f"The server does not admit new requests: {phase}."
    return error_answer(
        503, "ServiceUnavailableError", message, _retry_headers(state), state=state, phase=phase
    )


def _retry_headers(state: State) -> tuple[Header, ...]:
    retry = (b"retry-after", str(RETRY_AFTER_SECONDS[state]).encode())
    # Closing the connection lets a draining server stop without waiting for idle clients.
    return (retry, (b"connection", b"close")) if state == "draining" else (retry,)


class Gate:
    """ASGI middleware; see the module's text. Construct it with the app to protect."""

    def __init__(self, app: App) -> None:
        self.app = app
        self._key = os.environ.get("NIBBLE_API_KEY", "").encode()
        self._internal = os.environ.get("NIBBLE_GATE_INTERNAL", "").encode()
        self._state = GateState.open(os.environ.get("NIBBLE_GATE_STATE", ""))
        self._guard = RequestGuard()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan":
            return await self._lifespan(scope, receive, send)
        if kind not in ("http", "websocket"):
            raise ValueError(f"nibble's gate knows http and websocket connections, not {kind!r}")
        verb = scope["method"] if kind == "http" else WEBSOCKET
        caller, marked = self._identify(scope["headers"])
        answer = judge(verb, router_path(scope), is_canonical(scope), caller, *self._state.get())
        if answer is None:
            forwarded = _forwarded(scope, verb, marked)
            if verb == "POST" and not caller.internal:
                return await self._guarded(forwarded, receive, send)
            return await self.app(forwarded, receive, send)
        if kind == "http":
            return await _send_http(send, answer, with_body=verb != "HEAD")
        return await _refuse_websocket(scope, receive, send, answer)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """To vLLM, with a body that was read and checked here."""
        with self._guard.held() as held:
            try:
                receive = await self._guard.check(router_path(scope), scope, receive, held)
            except Refused as refused:
                return await _send_http(
                    send, error_answer(refused.status, refused.kind, str(refused))
                )
            except Disconnected:
                return None
            return await self.app(scope, receive, with_short_errors(send))

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """vLLM's own, after the limits on connections are in uvicorn; without them no server
        starts.
        """
        try:
            guard_connections(scope.get("app"), self._guard.limits, self._state)
        except MissingAttribute as missing:
            await receive()
            return await send({"type": "lifespan.startup.failed", "message": str(missing)})
        return await self.app(scope, receive, send)

    def _identify(self, headers: Iterable[Header]) -> tuple[Caller, bool]:
        """Who asks, and whether x-nibble-internal is there (right or wrong) and has to be taken
        off.
        """
        authorised, internal, marked = not self._key, False, False
        for name, value in headers:
            if name == b"authorization":
                scheme, _, given = value.partition(b" ")
                authorised |= scheme.lower() == b"bearer" and self._is_key(given.strip())
            elif name == b"x-api-key":  # what Anthropic's clients send to /v1/messages
                authorised |= self._is_key(value.strip())
            elif name == INTERNAL_HEADER:
                marked = True
                internal |= bool(self._internal) and hmac.compare_digest(value, self._internal)
        return Caller(authorised, internal), marked

    def _is_key(self, given: bytes) -> bool:
        return bool(self._key) and hmac.compare_digest(given, self._key)


def _forwarded(scope: Scope, verb: str, marked: bool) -> Scope:
    """The scope for vLLM: without our internal header, and HEAD as GET (HEAD is listed for /health
    alone, where vLLM only knows GET and its answer has no body).
    """
    changes: Scope = {}
    if marked:
        changes["headers"] = [pair for pair in scope["headers"] if pair[0] != INTERNAL_HEADER]
    if verb == "HEAD":
        changes["method"] = "GET"
    return {**scope, **changes} if changes else scope


async def _send_http(send: Send, answer: Answer, with_body: bool = True, prefix: str = "") -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(answer.body)).encode()),
        *answer.headers,
    ]
    await send(
        {"type": f"{prefix}http.response.start", "status": answer.status, "headers": headers}
    )
    await send({"type": f"{prefix}http.response.body", "body": answer.body if with_body else b""})


async def _refuse_websocket(scope: Scope, receive: Receive, send: Send, answer: Answer) -> None:
    """Refuse before the handshake: with the HTTP answer where the server can (uvicorn can), else
    by close.
    """
    if (await receive())["type"] != "websocket.connect":
        return
    if "websocket.http.response" in (scope.get("extensions") or {}):
        return await _send_http(send, answer, prefix="websocket.")
    code = 1013 if answer.status == 503 else 1008  # RFC 6455: try again later, policy violation
    await send({"type": "websocket.close", "code": code, "reason": ""})

"""The gate in front of vLLM: checks state, key and route before vLLM sees a request.

nibble passes it to vLLM as `--middleware nibble.engine.gate.asgi.Gate`. vLLM 0.32 adds it last, so
it is the outermost middleware (vllm/entrypoints/serve/middleware/register.py:65). It runs inside
every API process and reads these variables:

NIBBLE_API_KEY        the key; unset or empty: requests need no key
NIBBLE_GATE_STATE     path of the supervisor's state file (state.py); unset: the server stays
                      "starting"
NIBBLE_GATE_CONTROL   the control port, for the status page's data and nibble's metrics
NIBBLE_GATE_PROFILER  1 where the plan has --profiler-config; else its routes do not exist
NIBBLE_GATE_INTERNAL  a random value per start, which the supervisor's requests send in the header
                      `x-nibble-internal`

The gate checks a request only at its start. A request that was admitted before a drain runs to its
end.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nibble.engine.gate.control import METRICS_PATH, ask_control, with_own_metrics
from nibble.engine.gate.few_metrics import FEW_PATH, few_metrics
from nibble.engine.gate.routes import (
    DATA_PATHS,
    OPEN_METHODS,
    OPEN_PATHS,
    PROFILER_PATHS,
    READY_PATH,
    WEBSOCKET,
    allowed_methods,
    is_canonical,
    router_path,
)
from nibble.engine.gate.sleep import ENGINE_PATHS, sleep_or_wake
from nibble.engine.gate.state import GateState, State
from nibble.engine.guard.answers import with_short_errors
from nibble.engine.guard.body import Disconnected
from nibble.engine.guard.connections import guard_connections
from nibble.engine.guard.protocol import MissingAttribute
from nibble.engine.guard.refusal import Refused, error_body
from nibble.engine.guard.request_guard import RequestGuard
from nibble.engine.page.files import HEADERS, page_file

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]

INTERNAL_HEADER = b"x-nibble-internal"
# Starting: the next phase may be the last. Draining: this process ends, and the next one needs its
# start-up time. Paused: about the time of a long answer, because running requests end first.
METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
RETRY_AFTER_SECONDS: dict[State, int] = {"starting": 5, "ready": 1, "draining": 30, "paused": 10}


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the gate: HTTP status, body, extra headers, media type."""

    status: int
    body: bytes
    headers: tuple[Header, ...] = ()
    content_type: bytes = b"application/json"


@dataclass(frozen=True, slots=True)
class Caller:
    """The rights of a request.

    authorised: it has the key, or the server has none; internal: nibble's supervisor sent it.
    """

    authorised: bool
    internal: bool


def error_answer(
    status: int, kind: str, message: str, headers: tuple[Header, ...] = (), **extra: str
) -> Answer:
    """An error answer of the gate; `extra` are further keys of the error."""
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


NO_STORE = ((b"cache-control", b"no-store"),)
PAGE_HEADERS = tuple((name.lower().encode(), value.encode()) for name, value in HEADERS)
NO_SUPERVISOR = error_answer(
    503, "ServiceUnavailableError", "nibble's supervisor does not answer on its control port."
)


def judge(
    verb: str, path: str, canonical: bool, caller: Caller, state: State, phase: str
) -> Answer | None:
    """The gate's answer to a request, or None to pass it on.

    verb: the HTTP method or WEBSOCKET; path: decoded, as the router sees it; canonical: see
    routes.is_canonical. The order of the checks matters: without the key, a client learns neither
    the routes nor the state, except from the two open paths.
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
    if (file := page_file(path)) is not None:
        return Answer(200, file.body, PAGE_HEADERS, file.content_type.encode())
    if path in DATA_PATHS:
        return None  # in every state: the page shows them all
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
    """ASGI middleware around vLLM's app; see the docstring of the module."""

    def __init__(self, app: App, environ: Mapping[str, str] = os.environ) -> None:
        self.app = app
        self._key = environ.get("NIBBLE_API_KEY", "").encode()
        self._control = environ.get("NIBBLE_GATE_CONTROL", "")
        self._internal = environ.get("NIBBLE_GATE_INTERNAL", "").encode()
        self._hidden = () if environ.get("NIBBLE_GATE_PROFILER") == "1" else PROFILER_PATHS
        self._state = GateState.open(environ.get("NIBBLE_GATE_STATE", ""))
        self._guard = RequestGuard(environ)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan":
            return await self._lifespan(scope, receive, send)
        if kind not in ("http", "websocket"):
            raise ValueError(f"nibble's gate knows http and websocket connections, not {kind!r}")
        verb = scope["method"] if kind == "http" else WEBSOCKET
        caller, marked = self._identify(scope["headers"])
        path = router_path(scope)
        if caller.internal and (found := await _for_supervisor(scope, verb, path)) is not None:
            return await send_http(send, found)
        known = is_canonical(scope) and path not in self._hidden
        answer = self._judge(verb, path, known, caller)
        if answer is None and path in DATA_PATHS:
            answer = await self._page_data(path)
        if answer is None:
            forwarded = _forwarded(scope, verb, marked)
            if path == METRICS_PATH and self._control and not caller.internal:
                forwarded = _uncompressed(forwarded)
                send = await with_own_metrics(self._control, send)
            if verb == "POST" and not caller.internal:
                return await self._guarded(forwarded, receive, send)
            return await self.app(forwarded, receive, send)
        if kind == "http":
            return await send_http(send, answer, with_body=verb != "HEAD")
        return await refuse_websocket(scope, receive, send, answer)

    def _judge(self, verb: str, path: str, canonical: bool, caller: Caller) -> Answer | None:
        return judge(verb, path, canonical, caller, *self._state.get())

    async def _page_data(self, path: str) -> Answer:
        body = await ask_control(self._control, path)
        return NO_SUPERVISOR if body is None else Answer(200, body, NO_STORE)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read and check the body, then pass the request on or refuse it."""
        with self._guard.held() as held:
            try:
                receive = await self._guard.check(router_path(scope), scope, receive, held)
            except Refused as refused:
                return await send_http(
                    send, error_answer(refused.status, refused.kind, str(refused))
                )
            except Disconnected:
                return None
            return await self.app(scope, receive, with_short_errors(send))

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Set the limits on connections, then run vLLM's lifespan.

        The server does not start if the limits cannot be set.
        """
        try:
            guard_connections(scope.get("app"), self._guard.limits, self._state)
        except MissingAttribute as missing:
            await receive()
            return await send({"type": "lifespan.startup.failed", "message": str(missing)})
        return await self.app(scope, receive, send)

    def _identify(self, headers: Iterable[Header]) -> tuple[Caller, bool]:
        """The rights of a request, and whether it has the header x-nibble-internal.

        That header is removed before the request goes to vLLM, whether its value is right or not.
        """
        authorised, internal, marked = not self._key, False, False
        for name, value in headers:
            if name == b"authorization":
                scheme, _, token = value.partition(b" ")
                authorised |= scheme.lower() == b"bearer" and self._is_key(token.strip())
            elif name == b"x-api-key":  # Anthropic's clients send it to /v1/messages
                authorised |= self._is_key(value.strip())
            elif name == INTERNAL_HEADER:
                marked = True
                internal |= bool(self._internal) and hmac.compare_digest(value, self._internal)
        return Caller(authorised, internal), marked

    def _is_key(self, value: bytes) -> bool:
        return bool(self._key) and hmac.compare_digest(value, self._key)


async def _for_supervisor(scope: Scope, verb: str, path: str) -> Answer | None:
    """The answer to what nibble alone asks of this process; None for another request."""
    if verb == "POST" and path in ENGINE_PATHS:
        problem = await sleep_or_wake(scope.get("app"), path)
        return Answer(500 if problem else 200, problem.encode())
    if verb == "GET" and path == FEW_PATH:
        text = few_metrics(scope.get("query_string", b""))
        return Answer(501, b"") if text is None else Answer(200, text, (), METRICS_TYPE)
    return None


def _forwarded(scope: Scope, verb: str, marked: bool) -> Scope:
    """The scope for vLLM: without the internal header, and with GET in place of HEAD.

    HEAD is listed only for /health, where vLLM has only GET and its answer has an empty body.
    """
    changes: Scope = {}
    if marked:
        changes["headers"] = [pair for pair in scope["headers"] if pair[0] != INTERNAL_HEADER]
    if verb == "HEAD":
        changes["method"] = "GET"
    return {**scope, **changes} if changes else scope


def _uncompressed(scope: Scope) -> Scope:
    """The scope of a request for an answer without compression, to which text can be added."""
    kept = [pair for pair in scope["headers"] if pair[0] != b"accept-encoding"]
    return {**scope, "headers": kept}


async def send_http(send: Send, answer: Answer, with_body: bool = True, prefix: str = "") -> None:
    """Send an answer of the gate; `prefix` is for the refusal of a websocket."""
    headers = [
        (b"content-type", answer.content_type),
        (b"content-length", str(len(answer.body)).encode()),
        *answer.headers,
    ]
    await send(
        {"type": f"{prefix}http.response.start", "status": answer.status, "headers": headers}
    )
    await send({"type": f"{prefix}http.response.body", "body": answer.body if with_body else b""})


async def refuse_websocket(scope: Scope, receive: Receive, send: Send, answer: Answer) -> None:
    """Refuse before the handshake: with the HTTP answer if the server supports it, as uvicorn does,
    else with a close code.
    """
    if (await receive())["type"] != "websocket.connect":
        return
    if "websocket.http.response" in (scope.get("extensions") or {}):
        return await send_http(send, answer, prefix="websocket.")
    code = 1013 if answer.status == 503 else 1008  # RFC 6455: try again later, policy violation
    await send({"type": "websocket.close", "code": code, "reason": ""})

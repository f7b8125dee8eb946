"""The gate in front of a tiny ASGI app, driven with raw scopes: every rule of docs/security.md."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nibble.engine.gate.asgi import INTERNAL_HEADER, Gate
from nibble.engine.gate.few_metrics import path_for
from nibble.engine.gate.state import GateState
from nibble.engine.guard.protocol import GuardedProtocol

KEY = "nbl-the-key-of-this-test"
INTERNAL = "random-per-start"
CHAT = "/v1/chat/completions"
BEARER = (b"authorization", b"Bearer " + KEY.encode())


class RecordingApp:
    """The protected app: answers 200 and keeps the scopes that reached it."""

    def __init__(self) -> None:
        self.scopes: list[dict[str, Any]] = []

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"from the app"})


class Door:
    """A gate, its app and its state file, with requests as one-line calls."""

    def __init__(self, state_path: Path) -> None:
        self.state = GateState.create(state_path)
        self.state.set("ready", "ready")
        self.app = RecordingApp()
        self.gate = Gate(self.app)

    def send(self, scope: dict[str, Any]) -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect" if scope["type"] == "websocket" else "http.request"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        asyncio.run(self.gate(scope, receive, send))
        return sent

    def http(self, method: str, path: str, *headers: tuple[bytes, bytes], **changes: Any) -> Reply:
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "headers": list(headers),
            **changes,
        }
        return Reply(self.send(scope))

    def websocket(
        self, path: str, *headers: tuple[bytes, bytes], **changes: Any
    ) -> list[dict[str, Any]]:
        scope = {
            "type": "websocket",
            "path": path,
            "raw_path": path.encode(),
            "headers": list(headers),
            **changes,
        }
        return self.send(scope)


class Reply:
    def __init__(self, sent: list[dict[str, Any]]) -> None:
        start, body = sent
        self.status: int = start["status"]
        self.headers = dict(start["headers"])
        self.body: bytes = body["body"]

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Door:
    """Ready, with a key and an internal secret."""
    monkeypatch.setenv("NIBBLE_API_KEY", KEY)
    monkeypatch.setenv("NIBBLE_GATE_INTERNAL", INTERNAL)
    monkeypatch.setenv("NIBBLE_GATE_STATE", str(tmp_path / "gate"))
    return Door(tmp_path / "gate")


@pytest.fixture
def open_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Door:
    """Ready, without a key and without an internal secret (a loopback bind)."""
    monkeypatch.delenv("NIBBLE_API_KEY", raising=False)
    monkeypatch.setenv("NIBBLE_GATE_INTERNAL", "")
    monkeypatch.setenv("NIBBLE_GATE_STATE", str(tmp_path / "gate"))
    return Door(tmp_path / "gate")


# The key


@pytest.mark.parametrize(
    "method", ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "x"]
)
@pytest.mark.parametrize(
    "path", [CHAT, "/v1/models", "/invocations", "/metrics", "/", "", "/nowhere", "/healthz"]
)
def test_without_the_key_every_method_on_every_path_is_401(
    door: Door, method: str, path: str
) -> None:
    reply = door.http(method, path)
    assert reply.status == 401
    assert reply.headers[b"www-authenticate"] == b"Bearer"
    assert door.app.scopes == []


def test_401_has_the_shape_of_an_openai_error(door: Door) -> None:
    reply = door.http("POST", CHAT)
    assert reply.headers[b"content-type"] == b"application/json"
    assert reply.headers[b"content-length"] == str(len(reply.body)).encode()
    assert set(reply.error) == {"message", "type", "param", "code"}
    assert reply.error["code"] == 401


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_health_and_ready_answer_without_the_key(door: Door, method: str, path: str) -> None:
    assert door.http(method, path).status == 200


@pytest.mark.parametrize("method", ["POST", "OPTIONS", "DELETE"])
@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_other_methods_on_health_and_ready_need_the_key(door: Door, method: str, path: str) -> None:
    assert door.http(method, path).status == 401
    assert door.http(method, path, BEARER).status == 405


@pytest.mark.parametrize(
    "header",
    [
        (b"authorization", b"Bearer " + KEY.encode()),
        (b"authorization", b"bearer " + KEY.encode()),
        (b"authorization", b"BEARER   " + KEY.encode()),
        (b"x-api-key", KEY.encode()),
    ],
)
def test_right_key_passes_as_bearer_and_as_anthropic_x_api_key(
    door: Door, header: tuple[bytes, bytes]
) -> None:
    assert door.http("POST", CHAT, header).status == 200
    assert len(door.app.scopes) == 1


@pytest.mark.parametrize(
    "header",
    [
        (b"authorization", b""),
        (b"authorization", b"Bearer"),
        (b"authorization", b"Bearer "),
        (b"authorization", KEY.encode()),
        (b"authorization", b"Basic " + KEY.encode()),
        (b"authorization", b"Bearer " + KEY.encode() + b"x"),
        (b"authorization", b"Bearer " + KEY[:-1].encode()),
        (b"authorization", b"Bearer " + KEY.upper().encode()),
        (b"authorization", b"Bearer \xff\xfe"),
        (b"x-api-key", b""),
        (b"x-api-key", b"Bearer " + KEY.encode()),
        (b"cookie", b"authorization=Bearer " + KEY.encode()),
    ],
)
def test_wrong_or_misplaced_key_is_401(door: Door, header: tuple[bytes, bytes]) -> None:
    assert door.http("POST", CHAT, header).status == 401


def test_key_in_the_query_string_does_not_count(door: Door) -> None:
    assert door.http("POST", CHAT, query_string=b"api_key=" + KEY.encode()).status == 401


def test_wrong_bearer_beside_the_right_x_api_key_passes(door: Door) -> None:
    # Anthropic's SDK sends both headers when both of its variables are set.
    assert (
        door.http(
            "POST", CHAT, (b"authorization", b"Bearer other"), (b"x-api-key", KEY.encode())
        ).status
        == 200
    )


def test_non_ascii_key_works_as_utf8_bytes(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIBBLE_API_KEY", "schlüssel")
    door.gate = Gate(door.app)
    assert door.http("POST", CHAT, (b"authorization", "Bearer schlüssel".encode())).status == 200
    assert door.http("POST", CHAT, (b"authorization", b"Bearer schlussel")).status == 401


def test_without_a_configured_key_none_is_asked_for(open_door: Door) -> None:
    assert open_door.http("POST", CHAT).status == 200
    assert open_door.http("POST", CHAT, (b"authorization", b"Bearer anything")).status == 200


# The route list


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("POST", CHAT),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses"),
        ("GET", "/v1/responses/resp_0123456789abcdef"),
        ("POST", "/v1/responses/resp_0123456789abcdef/cancel"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/audio/transcriptions"),
        ("POST", "/v1/rerank"),
        ("POST", "/score"),
        ("POST", "/tokenize"),
        ("GET", "/metrics"),
        ("GET", "/version"),
        ("OPTIONS", CHAT),
    ],
)
def test_listed_route_passes_with_the_key_and_only_with_it(
    door: Door, method: str, path: str
) -> None:
    assert door.http(method, path).status == 401
    assert door.http(method, path, BEARER).status == 200


UNLISTED = [
    "/invocations",
    "/ping",
    "/pooling",
    "/load",
    "/docs",
    "/docs/oauth2-redirect",
    "/redoc",
    "/openapi.json",
    "/static/swagger-ui.css",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/collective_rpc",
    "/server_info",
    "/sleep",
    "/wake_up",
    "/pause",
    "/update_weights",
    "/reset_prefix_cache",
    "/profile",
    "/start_profile",
    "/stop_profile",
    "/start_profile/x",
    "/start_profilex",
    "/abort_requests",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/adapters",
    "/v1/chat/completions/render",
    "/v1/responses/render",
    "/inference/v1/generate",
    "/tokenizer_info",
    "/metricsx",
    "/metrics/x",
    "/v1",
    "/v2",
    "/",
    "",
]


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
@pytest.mark.parametrize("path", UNLISTED)
def test_unlisted_route_is_404_with_and_without_a_configured_key(
    door: Door, open_door: Door, method: str, path: str
) -> None:
    assert door.http(method, path, BEARER).status == 404
    assert open_door.http(method, path).status == 404
    assert door.app.scopes == open_door.app.scopes == []


@pytest.mark.parametrize("path", ["/nibble/engine/sleep", "/nibble/engine/wake"])
def test_only_the_server_of_several_models_reaches_the_engines_sleep(door: Door, path: str) -> None:
    assert door.http("POST", path).status == 401
    assert door.http("POST", path, BEARER).status == 404
    assert door.http("POST", path, BEARER, (INTERNAL_HEADER, b"wrong")).status == 404
    turned = door.http("POST", path, (INTERNAL_HEADER, INTERNAL.encode()))
    assert turned.status == 500 and b"AttributeError" in turned.body  # no engine here
    assert door.app.scopes == []


def test_the_supervisor_alone_reads_a_few_metrics(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = CollectorRegistry()
    for name in ("tokens", "others"):
        Counter(name, "Text.", registry=registry).inc(3)
    monkeypatch.setitem(
        sys.modules,
        "vllm.v1.metrics.prometheus",
        SimpleNamespace(get_prometheus_registry=lambda: registry),
    )
    path, _, query = path_for({"tokens_total"}).partition("?")
    internal = (INTERNAL_HEADER, INTERNAL.encode())
    reply = door.http("GET", path, internal, query_string=query.encode())
    assert reply.status == 200
    assert b"tokens_total 3.0" in reply.body and b"others" not in reply.body
    assert door.http("GET", path, BEARER).status == 404
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/nowhere")
    assert door.http("GET", path, internal).status == 501
    assert door.app.scopes == []


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
def test_the_profilers_routes_exist_with_its_flag_and_need_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: Door, path: str
) -> None:
    monkeypatch.setenv("NIBBLE_GATE_PROFILER", "1")
    with_flag = Door(tmp_path / "gate")
    assert with_flag.http("POST", path).status == 401
    assert with_flag.http("POST", path, BEARER).status == 200
    assert door.http("POST", path, BEARER).status == 404


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", CHAT, b"OPTIONS, POST"),
        ("DELETE", "/v1/responses/resp_1", b"GET, OPTIONS"),
        ("HEAD", "/v1/models", b"GET, OPTIONS"),
        ("post", CHAT, b"OPTIONS, POST"),
    ],
)
def test_listed_route_with_another_method_is_405(
    door: Door, method: str, path: str, allow: bytes
) -> None:
    reply = door.http(method, path, BEARER)
    assert (reply.status, reply.headers[b"allow"]) == (405, allow)


STRANGE_PATHS = [
    ("//v1/models", b"//v1/models"),
    ("/v1//models", b"/v1//models"),
    ("/v1/models/", b"/v1/models/"),
    ("/V1/Models", b"/V1/Models"),
    ("/v1/./models", b"/v1/./models"),
    ("/v1/x/../models", b"/v1/x/../models"),
    ("/v1/x/../models", b"/v1/x/%2e%2e/models"),
    ("/v1/models", b"/v1%2Fmodels"),
    ("/v1/models", b"/%761/models"),
    ("/v1/models\0", b"/v1/models%00"),
    ("/v1/models\0", b"/v1/models\0"),
    ("/v1/models\n", b"/v1/models%0A"),
    ("/v1/models\n", b"/v1/models\n"),
    ("/v1/models;x", b"/v1/models;x"),
    ("/v1/models?x", b"/v1/models%3Fx"),
    ("/v1\\models", b"/v1\\models"),
    ("v1/models", b"v1/models"),
    ("/health/", b"/health/"),
    ("//health", b"//health"),
    ("/Health", b"/Health"),
    ("/health", b"/%68ealth"),
    ("/ready", b"/read%79"),
    ("/health/../v1/models", b"/health/../v1/models"),
    ("/health\0/v1/models", b"/health%00/v1/models"),
    ("/v1/responses/", b"/v1/responses/"),
    ("/v1/responses/a/b", b"/v1/responses/a/b"),
    ("/v1/responses/a/b", b"/v1/responses/a%2Fb"),
    ("/v1/responses/..", b"/v1/responses/.."),
    ("/v1/responses/ü", "/v1/responses/ü".encode()),
    ("/v1/responses/a\n", b"/v1/responses/a\n"),
    ("/v1/responses/" + "a" * 129, b"/v1/responses/" + b"a" * 129),
    ("/v1/responses/a/cancel/", b"/v1/responses/a/cancel/"),
    ("/v1/responses/render", b"/v1/responses/render"),
    ("/v1/responses/render/cancel", b"/v1/responses/render/cancel"),
]


@pytest.mark.parametrize(("path", "raw_path"), STRANGE_PATHS)
def test_path_not_written_canonically_is_401_without_and_404_with_the_key(
    door: Door, path: str, raw_path: bytes
) -> None:
    assert door.http("GET", path, raw_path=raw_path).status == 401
    assert door.http("GET", path, BEARER, raw_path=raw_path).status == 404
    assert door.app.scopes == []


def test_server_that_sends_no_raw_path_is_judged_by_the_decoded_path(door: Door) -> None:
    assert door.http("GET", "/v1/models", BEARER, raw_path=None).status == 200
    assert door.http("GET", "/v1/../models", BEARER, raw_path=None).status == 404


@pytest.mark.parametrize(
    ("root_path", "path", "status"),
    [
        ("/api", "/api/v1/models", 200),
        ("/api", "/v1/models", 200),  # starlette routes a path that lacks the root path as it is
        ("/api", "/apiv1/models", 404),
        ("/api", "/api/api/v1/models", 404),
        ("/api", "/api", 404),
        ("/api", "/api//v1/models", 404),
        ("/api", "/api/invocations", 404),
        ("/v1", "/v1/models", 404),  # the router would look for /models
        ("/api/", "/api/v1/models", 404),
    ],
)
def test_root_path_is_taken_off_as_the_router_does(
    door: Door, root_path: str, path: str, status: int
) -> None:
    assert door.http("GET", path, root_path=root_path).status == 401
    assert door.http("GET", path, BEARER, root_path=root_path).status == status


def test_health_is_open_under_the_root_path_too(door: Door) -> None:
    assert door.http("GET", "/api/health", root_path="/api").status == 200


# Readiness and drain


@pytest.mark.parametrize(
    ("state", "phase"), [("starting", "load"), ("draining", "drain"), ("paused", "memory is short")]
)
def test_until_ready_while_paused_and_while_draining_listed_routes_are_503_with_the_phase(
    door: Door, open_door: Door, state, phase: str
) -> None:
    door.state.set(state, phase)
    open_door.state.set(state, phase)
    for reply in (door.http("POST", CHAT, BEARER), open_door.http("POST", CHAT)):
        assert reply.status == 503
        assert int(reply.headers[b"retry-after"]) > 0
        assert (reply.error["state"], reply.error["phase"]) == (state, phase)
        assert phase in reply.error["message"]
    assert door.app.scopes == open_door.app.scopes == []


@pytest.mark.parametrize("state", ["starting", "draining", "paused"])
def test_without_the_key_no_client_learns_the_state_from_other_routes(door: Door, state) -> None:
    door.state.set(state, "load")
    reply = door.http("POST", CHAT)
    assert reply.status == 401
    assert b"load" not in reply.body


@pytest.mark.parametrize("state", ["starting", "draining", "paused"])
def test_health_and_ready_are_503_with_the_phase_unless_ready(door: Door, state) -> None:
    door.state.set(state, "warm-up")
    health, ready = door.http("GET", "/health"), door.http("GET", "/ready")
    assert health.status == ready.status == 503
    assert (health.error["state"], health.error["phase"]) == (state, "warm-up")
    assert json.loads(ready.body) == {"state": state, "phase": "warm-up"}
    assert b"retry-after" in health.headers
    assert b"retry-after" in ready.headers
    assert door.app.scopes == []


def test_ready_is_answered_by_the_gate_and_health_by_vllm(door: Door) -> None:
    ready, health = door.http("GET", "/ready"), door.http("GET", "/health")
    assert json.loads(ready.body) == {"state": "ready", "phase": "ready"}
    assert health.body == b"from the app"
    assert [scope["path"] for scope in door.app.scopes] == ["/health"]


def test_head_gets_no_body_from_the_gate_and_reaches_vllm_health_as_get(door: Door) -> None:
    ready = door.http("HEAD", "/ready")
    assert (ready.body, int(ready.headers[b"content-length"])) == (b"", 36)
    door.http("HEAD", "/health")
    assert door.app.scopes[0]["method"] == "GET"


def test_draining_answer_closes_its_connection(door: Door) -> None:
    assert b"connection" not in door.http("POST", CHAT).headers
    door.state.set("draining", "drain")
    assert door.http("POST", CHAT, BEARER).headers[b"connection"] == b"close"


def test_unlisted_route_stays_404_while_starting(door: Door) -> None:
    door.state.set("starting", "load")
    assert door.http("POST", "/invocations", BEARER).status == 404


def test_gate_without_a_state_file_stays_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NIBBLE_GATE_STATE", raising=False)
    monkeypatch.delenv("NIBBLE_API_KEY", raising=False)
    door = Door(tmp_path / "gate")
    assert door.http("POST", CHAT).error["state"] == "starting"


def test_request_in_flight_when_the_drain_begins_finishes_untouched(door: Door) -> None:
    chunks = [b"one ", b"two ", b"three"]

    async def streaming_app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for index, chunk in enumerate(chunks):
            if index == 1:
                door.state.set("draining", "drain")
            await send({"type": "http.response.body", "body": chunk, "more_body": index < 2})

    door.gate.app = streaming_app
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [BEARER]}
    start, *body = door.send(scope)
    assert start["status"] == 200
    assert [message["body"] for message in body] == chunks
    assert door.http("POST", CHAT, BEARER).status == 503


# The supervisor's own requests


def test_internal_header_passes_readiness_and_key_and_is_taken_off(door: Door) -> None:
    door.state.set("starting", "warm-up")
    other = (b"content-type", b"application/json")
    assert door.http("POST", CHAT, (INTERNAL_HEADER, INTERNAL.encode()), other).status == 200
    assert door.http("GET", "/health", (INTERNAL_HEADER, INTERNAL.encode())).body == b"from the app"
    assert door.app.scopes[0]["headers"] == [other]


@pytest.mark.parametrize("value", [b"", b"wrong", INTERNAL.encode() + b"x"])
def test_wrong_internal_header_opens_nothing(door: Door, value: bytes) -> None:
    assert door.http("POST", CHAT, (INTERNAL_HEADER, value)).status == 401
    door.state.set("starting", "load")
    assert door.http("POST", CHAT, (INTERNAL_HEADER, value), BEARER).status == 503


def test_wrong_internal_header_is_taken_off_before_vllm_too(door: Door) -> None:
    door.http("POST", CHAT, (INTERNAL_HEADER, b"wrong"), BEARER)
    assert door.app.scopes[0]["headers"] == [BEARER]


def test_internal_header_opens_nothing_when_no_secret_is_set(
    open_door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_door.state.set("starting", "load")
    assert open_door.http("POST", CHAT, (INTERNAL_HEADER, b"")).status == 503
    monkeypatch.setenv("NIBBLE_API_KEY", KEY)
    open_door.gate = Gate(open_door.app)
    assert open_door.http("POST", CHAT, (INTERNAL_HEADER, b"")).status == 401


def test_internal_header_does_not_open_unlisted_routes(door: Door) -> None:
    assert door.http("POST", "/invocations", (INTERNAL_HEADER, INTERNAL.encode())).status == 404


# Websockets and other scopes

DENIAL = {"websocket.http.response": {}}


def test_websocket_without_the_key_is_closed_with_1008_before_it_is_accepted(door: Door) -> None:
    assert door.websocket("/v1/realtime") == [
        {"type": "websocket.close", "code": 1008, "reason": ""}
    ]
    assert door.app.scopes == []


@pytest.mark.parametrize("path", ["/v1/realtime", "/health", "/ready", "/nowhere", "/metrics"])
def test_websocket_without_the_key_is_401_where_the_server_can_say_so(
    door: Door, path: str
) -> None:
    start, body = door.websocket(path, extensions=DENIAL)
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 401)
    assert body["type"] == "websocket.http.response.body"
    assert json.loads(body["body"])["error"]["code"] == 401


def test_websocket_with_the_key_is_accepted_on_the_listed_route_only(door: Door) -> None:
    assert door.websocket("/v1/realtime", BEARER) == [{"type": "websocket.accept"}]
    for path in (CHAT, "/health", "/ready", "/nowhere", "//v1/realtime"):
        assert door.websocket(path, BEARER, extensions=DENIAL)[0]["status"] == 404
    assert len(door.app.scopes) == 1


def test_plain_http_on_a_websocket_route_is_404(door: Door) -> None:
    assert door.http("GET", "/v1/realtime", BEARER).status == 404


@pytest.mark.parametrize("state", ["starting", "draining", "paused"])
def test_websocket_is_refused_unless_ready(door: Door, state) -> None:
    door.state.set(state, "load")
    assert door.websocket("/v1/realtime", BEARER, extensions=DENIAL)[0]["status"] == 503
    assert door.websocket("/v1/realtime", BEARER)[0]["code"] == 1013


def test_lifespan_passes_whatever_the_state(door: Door) -> None:
    door.state.set("starting", "load")
    config = SimpleNamespace(http_protocol_class=HttpToolsProtocol, ws_max_size=1 << 24)
    state = SimpleNamespace(server=SimpleNamespace(config=config))
    scope = {"type": "lifespan", "app": SimpleNamespace(state=state)}
    door.send(scope)
    assert door.app.scopes == [scope]
    assert config.http_protocol_class.func is GuardedProtocol


def test_no_server_starts_without_the_limits_on_connections(door: Door) -> None:
    sent = door.send({"type": "lifespan", "app": None})
    assert sent[0]["type"] == "lifespan.startup.failed"
    assert "app.state.server" in sent[0]["message"]
    assert door.app.scopes == []


def test_unknown_scope_type_is_refused(door: Door) -> None:
    with pytest.raises(ValueError, match="webtransport"):
        door.send({"type": "webtransport", "path": "/v1/models", "headers": [BEARER]})
    assert door.app.scopes == []


def test_scope_passes_unchanged_when_there_is_nothing_to_take_off(door: Door) -> None:
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [BEARER]}
    door.send(scope)
    assert door.app.scopes[0] is scope


def test_gate_imports_nothing_heavy() -> None:
    program = "import sys, nibble.engine.gate.asgi; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "vllm", "pydantic", "starlette", "fastapi", "rich"} & set(loaded)

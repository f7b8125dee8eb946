"""The gate on vLLM's real app: every route vLLM registers is either listed or denied here with a
reason.

The app is built by vLLM's own build_app with everything switched on that adds routes (all tasks, a
pooling
model, development mode, runtime LoRA, profiler, scale-out, fault tolerance, offline docs). No
engine runs:
the gate's own answers need none, and what it lets through only has to be answered by something
else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nibble.engine.gate.asgi import Gate
from nibble.engine.gate.routes import LISTED, WEBSOCKET, allowed_methods, router_path
from nibble.engine.gate.state import GateState

pytestmark = pytest.mark.vllm

KEY = "nbl-the-key-of-this-test"
BEARER = (b"authorization", b"Bearer " + KEY.encode())
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]

_DOCS = "describes routes that clients cannot reach; development aid"
_SECOND_DOOR = "a second door to listed routes, of another platform's making"
_ENGINE = "changes what every other client gets: pauses, sleeps or resizes the engine"
_WEIGHTS = "replaces or reveals weights"
_CACHE = "slows every other client down"
_LORA = "loads from a path or repository of the caller's choice"
_INNER = "between vLLM processes of a larger deployment, never for clients"
_INSIDE = "reveals the server's insides"
_OTHERS = "stops other clients' requests"

DENIED = {
    "/docs": _DOCS,
    "/docs/oauth2-redirect": _DOCS,
    "/redoc": _DOCS,
    "/openapi.json": _DOCS,
    "/static": _DOCS,
    "/ping": _SECOND_DOOR,
    "/invocations": _SECOND_DOOR,
    "/pooling": "hands its body to plugins; /v1/embeddings, /score and /classify serve clients",
    "/load": _INSIDE,
    "/server_info": _INSIDE,
    "/kv_event_sources": _INSIDE,
    "/tokenizer_info": _INSIDE,
    "/get_world_size": _INSIDE,
    "/is_sleeping": _INSIDE,
    "/is_paused": _INSIDE,
    "/is_scaling_elastic_ep": _INSIDE,
    "/fault_tolerance/status": _INSIDE,
    "/collective_rpc": "calls any method of the workers",
    "/sleep": _ENGINE,
    "/wake_up": _ENGINE,
    "/release_kv_cache_memory": _ENGINE,
    "/pause": _ENGINE,
    "/resume": _ENGINE,
    "/scale_elastic_ep": _ENGINE,
    "/fault_tolerance/apply": _ENGINE,
    "/reset_prefix_cache": _CACHE,
    "/reset_mm_cache": _CACHE,
    "/reset_encoder_cache": _CACHE,
    "/abort_requests": _OTHERS,
    "/inference/v1/abort_requests": _OTHERS,
    "/inference/v1/generate": _INNER,
    "/v1/chat/completions/render": _INNER,
    "/v1/chat/completions/derender": _INNER,
    "/v1/completions/render": _INNER,
    "/v1/completions/derender": _INNER,
    "/v1/messages/render": _INNER,
    "/v1/responses/render": _INNER,
    "/init_weight_transfer_engine": _WEIGHTS,
    "/shutdown_weight_transfer_engine": _WEIGHTS,
    "/start_weight_update": _WEIGHTS,
    "/start_draft_weight_update": _WEIGHTS,
    "/update_weights": _WEIGHTS,
    "/finish_weight_update": _WEIGHTS,
    "/update_weight_version": _WEIGHTS,
    "/weight_info": _WEIGHTS,
    "/weight_checker": _WEIGHTS,
    "/v1/load_lora_adapter": _LORA,
    "/v1/unload_lora_adapter": _LORA,
    "/adapters": _LORA,
    "/adapters/{adapter_name}": _LORA,
}


def tiny_pooling_model(folder: Path) -> Path:
    """A config.json from which vLLM makes a real ModelConfig of an embedding model; no weights
    are read.
    """
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 512,
        "max_position_embeddings": 256,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def build_vllm_app(model: Path, *flags: str) -> Any:
    from vllm.config import ModelConfig
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.tasks import FRONTEND_TASKS, GENERATION_TASKS, POOLING_TASKS
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(
        ["--middleware", "nibble.engine.gate.asgi.Gate", *flags]
    )
    assert args
    pooling = ModelConfig(
        model=str(model), skip_tokenizer_init=True, runner="pooling", convert="embed"
    )
    # The combined task would take precedence and switch the scoring routes off (vllm
    # config/model.py:1926).
    tasks: list[Any] = [
        task for task in GENERATION_TASKS + POOLING_TASKS + FRONTEND_TASKS if "&" not in task
    ]
    return build_app(args, tuple(tasks), pooling)


class Server:
    """vLLM's app with the gate on it, ready, and its state file."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.state = GateState.create(folder / "gate")
        self.state.set("ready", "ready")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NIBBLE_API_KEY", KEY)
            patch.setenv("NIBBLE_GATE_STATE", str(folder / "gate"))
            for name in (
                *("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
                "NIBBLE_GATE_PROFILER",
            ):
                patch.setenv(name, "1")
            self.app = build_vllm_app(tiny_pooling_model(folder), *flags)

    def ask(self, verb: str, path: str, *headers: tuple[bytes, bytes]) -> tuple[int, bytes]:
        """Status and body; what a handler raises for want of an engine counts as the 500 it
        would be.
        """
        kind = "websocket" if verb == WEBSOCKET else "http"
        messages = [{"type": "http.request", "body": b"{}", "more_body": False}]
        if kind == "websocket":
            messages = [{"type": "websocket.connect"}]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return messages.pop(0) if messages else {"type": f"{kind}.disconnect", "code": 1000}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": kind,
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": verb,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), *headers],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
            "extensions": {"websocket.http.response": {}},
        }
        with contextlib.suppress(Exception):
            asyncio.run(self.app(scope, receive, send))
        body = b"".join(
            message.get("body", b"") for message in sent if message["type"].endswith("body")
        )
        return (sent[0].get("status", 0) if sent else 500), body


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> list[Server]:
    """Two apps that together register every route: the docs come in two exclusive forms."""
    everything = [
        "--enable-scale-out",
        "--enable-tokenizer-info-endpoint",
        "--enable-fault-tolerance",
        "--profiler-config",
        json.dumps(
            {"profiler": "torch", "torch_profiler_dir": str(tmp_path_factory.mktemp("profile"))}
        ),
    ]
    return [
        Server(tmp_path_factory.mktemp("online"), *everything),
        Server(tmp_path_factory.mktemp("offline"), *everything, "--enable-offline-docs"),
    ]


def routes_of(server: Server) -> Iterator[tuple[str, frozenset[str]]]:
    """(path template, verbs) of every route; a mount answers every method."""
    for route in server.app.routes:
        name = type(route).__name__
        if name in ("Route", "APIRoute"):
            yield route.path, frozenset(route.methods)
        elif name in ("WebSocketRoute", "APIWebSocketRoute"):
            yield route.path, frozenset({WEBSOCKET})
        elif name == "Mount":
            yield route.path, frozenset(METHODS)
        else:
            pytest.fail(f"vLLM registers a kind of route this test does not know: {name} {route}")


def filled(template: str) -> str:
    return template.replace("{response_id}", "resp_1").replace("{adapter_name}", "some")


def every_route(servers: list[Server]) -> list[tuple[Server, str, frozenset[str]]]:
    return [
        (server, filled(path), verbs) for server in servers for path, verbs in routes_of(server)
    ]


def from_gate(body: bytes) -> str:
    """The gate's error type, empty where the answer is not the gate's."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return json.loads(body)["error"]["type"]
    return ""


def test_gate_is_the_outermost_middleware(servers: list[Server]) -> None:
    assert [server.app.user_middleware[0].cls for server in servers] == [Gate, Gate]


def test_every_route_of_vllm_is_listed_or_denied_with_a_reason(servers: list[Server]) -> None:
    registered = {path for server in servers for path, _ in routes_of(server)}
    unlisted = {path for path in registered if not allowed_methods(filled(path))}
    assert unlisted - set(DENIED) == set(), (
        "new in vLLM: list them in nibble/engine/gate/routes.py or deny them here"
    )
    assert set(DENIED) - unlisted == set(), "gone from vLLM, or listed"


def test_every_listed_verb_but_preflight_and_ready_exists_in_vllm(servers: list[Server]) -> None:
    registered: dict[str, set[str]] = {}
    for _, path, verbs in every_route(servers):
        registered.setdefault(path, set()).update(verbs)
    for path, methods in LISTED.items():
        if path != "/ready":
            assert methods - {"OPTIONS", "HEAD"} <= registered.get(path, set()), path


def test_without_the_key_every_route_answers_401_to_every_method(servers: list[Server]) -> None:
    answers = {
        (path, verb): server.ask(verb, path)[0]
        for server, path, _ in every_route(servers)
        for verb in (*METHODS, WEBSOCKET)
    }
    opened = {asked for asked, status in answers.items() if status != 401}
    assert opened == {("/health", "GET"), ("/health", "HEAD")}
    assert len(answers) > 500


@pytest.mark.parametrize(
    "path",
    ["/metrics/", "/metrics/x", "/metricsx", "/static/swagger-ui.css", "/nowhere", "//health"],
)
def test_paths_under_mounts_and_unknown_paths_are_401_then_404(
    servers: list[Server], path: str
) -> None:
    for server in servers:
        assert server.ask("GET", path)[0] == 401
        status, body = server.ask("GET", path, BEARER)
        assert (status, from_gate(body)) == (404, "RouteNotListedError")


def test_with_the_key_denied_routes_are_404_from_the_gate(servers: list[Server]) -> None:
    denied = {filled(path) for path in DENIED}
    for server, path, verbs in every_route(servers):
        for verb in verbs - {"HEAD"} if path in denied else ():
            status, body = server.ask(verb, path, BEARER)
            assert (status, from_gate(body)) == (404, "RouteNotListedError"), (verb, path)


def test_with_the_key_listed_routes_reach_vllm(servers: list[Server]) -> None:
    gate_errors = {
        "AuthenticationError",
        "RouteNotListedError",
        "MethodNotAllowedError",
        "ServiceUnavailableError",
    }
    reached = 0
    for server, path, verbs in every_route(servers):
        for verb in verbs & (allowed_methods(path) or frozenset()):
            assert from_gate(server.ask(verb, path, BEARER)[1]) not in gate_errors, (verb, path)
            reached += 1
    assert reached > 40


def test_metrics_and_version_really_answer_with_the_key(servers: list[Server]) -> None:
    for path, part in (("/metrics", b"# HELP"), ("/version", b'"version"')):
        status, body = servers[0].ask("GET", path, BEARER)
        assert status == 200
        assert part in body


def test_starting_and_draining_servers_answer_503_on_every_listed_route(
    servers: list[Server],
) -> None:
    try:
        for server, path, verbs in every_route(servers):
            server.state.set("draining", "drain")
            for verb in verbs & (allowed_methods(path) or frozenset()):
                status, body = server.ask(verb, path, BEARER)
                assert (status, json.loads(body)["error"]["phase"]) == (503, "drain"), (verb, path)
    finally:
        for server in servers:
            server.state.set("ready", "ready")


def test_cors_preflight_needs_the_key_too(servers: list[Server]) -> None:
    preflight = [(b"origin", b"https://example.org"), (b"access-control-request-method", b"POST")]
    assert servers[0].ask("OPTIONS", "/v1/chat/completions", *preflight)[0] == 401
    assert servers[0].ask("OPTIONS", "/v1/chat/completions", *preflight, BEARER)[0] not in (
        401,
        404,
        503,
    )


def test_root_path_is_understood_as_vllm_does(tmp_path: Path) -> None:
    server = Server(tmp_path, "--root-path", "/api")
    for path in ("/api/version", "/version"):
        assert server.ask("GET", path)[0] == 401
        assert server.ask("GET", path, BEARER)[0] == 200
    for path in ("/api/invocations", "/api/api/version", "/api//version", "/apiversion"):
        assert server.ask("GET", path)[0] == 401
        assert server.ask("GET", path, BEARER)[0] == 404


@pytest.mark.parametrize("root_path", ["", "/", "/api", "/api/", "/v1", "api"])
@pytest.mark.parametrize(
    "path",
    ["", "/", "/api", "/api/", "/api/v1", "/apiv1", "/v1/models", "//v1", "/api//v1", "api/v1"],
)
def test_gate_and_router_see_the_same_path(root_path: str, path: str) -> None:
    from starlette._utils import get_route_path

    scope = {"type": "http", "path": path, "root_path": root_path}
    assert router_path(scope) == get_route_path(scope)


# The same app behind a real uvicorn: what the parsers make of odd bytes, and websocket handshakes.

UPGRADE = (
    "Connection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
WITH_KEY = f"Authorization: Bearer {KEY}\r\n"


@pytest.fixture(scope="module")
def port(servers: list[Server]) -> Iterator[int]:
    import uvicorn

    servers[
        0
    ].app.state.log_stats = False  # asked for by vLLM's lifespan; there is no engine to log about
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(servers[0].app, log_level="error")
    config.load()
    # As vLLM does, launchers/launcher.py:232
    server = servers[0].app.state.server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.02)
    yield listening.getsockname()[1]
    server.should_exit = True
    thread.join(10)


def raw_request(port: int, target: str, headers: str = "", method: str = "GET") -> bytes:
    """The whole answer to one request on a separate connection."""
    close = "" if "Upgrade" in headers else "Connection: close\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(
            f"{method} {target} HTTP/1.1\r\nHost: x\r\n{close}{headers}\r\n".encode()
        )
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
            if answer.startswith(b"HTTP/1.1 101"):
                break
    return answer


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize(
    "target",
    [
        "/version",
        "/v1/models",
        "/%68ealth",
        "//version",
        "/health%2f..%2fversion",
        "/health/../version",
    ],
)
def test_uvicorn_without_the_key_is_401_however_the_path_is_written(port: int, target: str) -> None:
    assert status_of(raw_request(port, target)) == 401
    assert status_of(raw_request(port, f"http://x{target}")) == 401


@pytest.mark.parametrize(
    "target", ["/%76ersion", "//version", "/version%00", "/x%2f..%2fversion", "/version/"]
)
def test_uvicorn_with_the_key_is_404_for_a_path_not_written_canonically(
    port: int, target: str
) -> None:
    assert status_of(raw_request(port, target, WITH_KEY)) == 404


def test_uvicorn_with_the_key_answers_also_with_a_query(port: int) -> None:
    assert status_of(raw_request(port, "/version?a=%2F", WITH_KEY)) == 200


def test_uvicorn_refuses_a_websocket_without_the_key_before_the_handshake(port: int) -> None:
    refused = raw_request(port, "/v1/realtime", UPGRADE)
    assert status_of(refused) == 401
    assert b'"AuthenticationError"' in refused
    assert status_of(raw_request(port, "/health", UPGRADE)) == 401


def test_uvicorn_accepts_a_websocket_with_the_key_on_the_listed_route(port: int) -> None:
    assert status_of(raw_request(port, "/nowhere", UPGRADE + WITH_KEY)) == 404
    assert status_of(raw_request(port, "/v1/realtime", UPGRADE + WITH_KEY)) in (
        101,
        500,
    )  # 500: no engine


def test_uvicorn_closes_the_connection_of_a_request_refused_while_draining(
    port: int, servers: list[Server]
) -> None:
    servers[0].state.set("draining", "drain")
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(f"GET /version HTTP/1.1\r\nHost: x\r\n{WITH_KEY}\r\n".encode())
            answer = b""
            while chunk := connection.recv(65536):  # ends only when the server closes
                answer += chunk
    finally:
        servers[0].state.set("ready", "ready")
    assert status_of(answer) == 503

"""The status page on the control port and behind the gate: files, headers, key, chat."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from nibble.engine.api import Api
from nibble.engine.gate.asgi import Gate
from nibble.engine.gate.state import GateState, State
from nibble.engine.page.files import FILE_PATHS, POLICY, page_file
from nibble.serve.chat_forward import MAX_BODY_BYTES
from nibble.serve.control import Answers, ControlServer

KEY = "nbl-the-key-of-this-test"
BEARER = (b"authorization", b"Bearer " + KEY.encode())
STATUS = {"state": "starting", "phase": "load", "plan": {"args": {}}}
CHAT = "/v1/chat/completions"


class Upstream(BaseHTTPRequestHandler):
    """An API that wants the key and streams two pieces."""

    seen: list[tuple[str, str | None, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        type(self).seen.append((self.path, self.headers.get("Authorization"), body))
        allowed = self.headers.get("Authorization") == f"Bearer {KEY}"
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Type", "text/event-stream" if allowed else "application/json")
        self.end_headers()
        for piece in (b"data: 1\n\n", b"data: [DONE]\n\n") if allowed else (b"{}",):
            self.wfile.write(piece)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def upstream() -> Iterator[ThreadingHTTPServer]:
    Upstream.seen = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def control(upstream: ThreadingHTTPServer) -> Iterator[ControlServer]:
    server = ControlServer(0, lambda: STATUS, lambda: False)
    api = Api("127.0.0.1", upstream.server_address[1], "internal-token")
    server.answers = Answers(lambda: STATUS, lambda: False, str, None, None, api)
    server.start()
    yield server
    server.close()


def ask(
    port: int, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, sent)
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


# The files


def test_the_page_names_only_files_of_this_server() -> None:
    for path in FILE_PATHS:
        file = page_file(path)
        assert file is not None
        text = file.body.decode()
        assert not re.search(r"(?:https?:)?//[\w.]+\.\w", text), path
        assert not re.search(r"\son\w+=|style=|<style|javascript:|innerHTML|eval\(", text), path


def test_the_policy_allows_no_inline_code_and_no_other_host() -> None:
    assert POLICY.startswith("default-src 'none'")
    assert "unsafe" not in POLICY
    sources = [part.split()[1:] for part in POLICY.split(";")]
    assert {source for part in sources for source in part} == {"'none'", "'self'", "data:"}


def test_the_key_is_kept_for_the_tab_and_goes_into_a_header() -> None:
    file = page_file("/nibble/page.js")
    assert file is not None
    script = file.body.decode()
    assert "sessionStorage" in script
    assert "localStorage" not in script
    assert "cookie" not in script


# The control port


@pytest.mark.parametrize("path", ["/", *sorted(FILE_PATHS)])
def test_the_control_port_serves_the_page_with_its_policy(
    control: ControlServer, path: str
) -> None:
    status, headers, body = ask(control.port, "GET", path)
    assert status == 200
    assert headers["Content-Security-Policy"] == POLICY
    assert len(body) == int(headers["Content-Length"])
    assert ask(control.port, "HEAD", path)[2] == b""
    assert ask(control.port, "GET", path, Host="evil.example")[0] == 403


def test_before_the_engine_the_page_gets_the_status_without_traffic(
    control: ControlServer,
) -> None:
    live = json.loads(ask(control.port, "GET", "/nibble/live")[2])
    assert (live["phase"], live["traffic"], live["problems"]) == ("load", None, [])
    assert json.loads(ask(control.port, "GET", "/nibble/status")[2]) == STATUS
    assert b'nibble_phase{phase="load"} 1' in ask(control.port, "GET", "/metrics")[2]


def test_a_chat_keeps_the_clients_key_and_never_gets_nibbles_pass(
    control: ControlServer,
) -> None:
    json_type = {"Content_Type": "application/json"}
    status, headers, body = ask(
        control.port, "POST", CHAT, b"{}", Authorization=f"Bearer {KEY}", **json_type
    )
    assert (status, body) == (200, b"data: 1\n\ndata: [DONE]\n\n")
    assert headers["Content-Type"] == "text/event-stream"
    assert ask(control.port, "POST", CHAT, b"{}", **json_type)[0] == 401
    assert Upstream.seen == [(CHAT, f"Bearer {KEY}", b"{}"), (CHAT, None, b"{}")]


@pytest.mark.parametrize(
    ("wanted", "headers"),
    [
        (403, {"Content_Type": "application/json", "Origin": "http://evil.example"}),
        (403, {"Content_Type": "application/json", "Origin": "null"}),
        (403, {"Content_Type": "application/json", "Host": "evil.example"}),
        (415, {"Content_Type": "text/plain"}),
        (413, {"Content_Type": "application/json", "Content_Length": str(MAX_BODY_BYTES + 1)}),
        (413, {"Content_Type": "application/json", "Content_Length": "-1"}),
    ],
)
def test_a_chat_from_elsewhere_reaches_no_api(
    control: ControlServer, wanted: int, headers: dict[str, str]
) -> None:
    body = None if "Content_Length" in headers else b"{}"
    assert ask(control.port, "POST", CHAT, body, **headers)[0] == wanted
    assert Upstream.seen == []


def test_only_a_chat_is_passed_on(control: ControlServer) -> None:
    for path in ("/status", "/nibble/live", "/v1/completions", CHAT + "?x=1"):
        assert ask(control.port, "POST", path, b"{}", Content_Type="application/json")[0] == 501
    assert Upstream.seen == []


def test_a_chat_without_an_api_is_503_or_502(upstream: ThreadingHTTPServer) -> None:
    server = ControlServer(0, lambda: STATUS, lambda: False)
    server.start()
    try:
        post = ("POST", CHAT, b"{}")
        assert ask(server.port, *post, Content_Type="application/json")[0] == 503
        gone = Api("127.0.0.1", 1, "")
        server.answers = Answers(lambda: STATUS, lambda: False, str, None, None, gone)
        assert ask(server.port, *post, Content_Type="application/json")[0] == 502
    finally:
        server.close()


# The gate


class Door:
    """A gate with a key, in front of an app that answers as vLLM's /metrics."""

    def __init__(self, path: Path) -> None:
        self.state = GateState.create(path)
        self.scopes: list[dict[str, Any]] = []
        self.gate = Gate(self._app)

    async def _app(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        headers = [(b"content-length", b"9"), (b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"vllm:x 1\n"})

    def get(
        self, path: str, *headers: tuple[bytes, bytes]
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {
            **{"type": "http", "method": "GET", "path": path, "raw_path": path.encode()},
            **{"root_path": "", "headers": list(headers)},
        }
        asyncio.run(self.gate(scope, receive, send))
        return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control: ControlServer) -> Door:
    monkeypatch.setenv("NIBBLE_API_KEY", KEY)
    monkeypatch.setenv("NIBBLE_GATE_INTERNAL", "internal-token")
    monkeypatch.setenv("NIBBLE_GATE_STATE", str(tmp_path / "gate"))
    monkeypatch.setenv("NIBBLE_GATE_CONTROL", str(control.port))
    return Door(tmp_path / "gate")


@pytest.mark.parametrize("state", ["starting", "ready", "paused", "draining"])
def test_the_gate_serves_files_without_the_key_and_data_with_it(door: Door, state: State) -> None:
    door.state.set(state, state)
    for path in FILE_PATHS:
        status, headers, _ = door.get(path)
        assert (status, headers[b"content-security-policy"]) == (200, POLICY.encode())
    for path in ("/nibble/live", "/nibble/status"):
        assert door.get(path)[0] == 401
        status, _, body = door.get(path, BEARER)
        assert (status, json.loads(body)["phase"]) == (200, "load")
    assert door.scopes == []


def test_a_gate_without_a_supervisor_says_so(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door.gate, "_control", "1")
    status, _, body = door.get("/nibble/live", BEARER)
    assert status == 503
    assert "supervisor" in json.loads(body)["error"]["message"]


def test_nibbles_metrics_stand_before_vllms(door: Door) -> None:
    door.state.set("ready", "ready")
    status, headers, body = door.get("/metrics", BEARER, (b"accept-encoding", b"gzip"))
    assert status == 200
    assert body.startswith(b"# HELP nibble_phase")
    assert body.endswith(b"vllm:x 1\n")
    assert int(headers[b"content-length"]) == len(body)
    assert b"accept-encoding" not in dict(door.scopes[0]["headers"])


def test_the_supervisors_own_reading_has_only_vllms(door: Door) -> None:
    door.state.set("ready", "ready")
    assert door.get("/metrics", (b"x-nibble-internal", b"internal-token"))[2] == b"vllm:x 1\n"

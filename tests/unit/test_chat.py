"""`nibble chat` against a server that refuses, breaks off or is not there: one line each, with
its exit code.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from nibble.cli.chat import ask
from nibble.errors import ExitCode, NibbleError
from tests.support.refusals import refusal_of

Answer = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], dict[str, str]]]:
    """Starts a server that answers every POST so; its address as variables."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Answer) -> dict[str, str]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                answer(self)
                self.close_connection = True

            def log_message(self, format: str, *args: object) -> None: ...

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return {"PORT": str(servers[-1].server_address[1]), "NIBBLE_CACHE_DIR": "/nowhere"}

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def refusal(environ: dict[str, str]) -> NibbleError:
    return refusal_of(lambda: ask("Hello?", "default", 8, environ))


def test_an_answer_is_printed_as_it_comes(serve, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        events = [
            json.dumps({"choices": [{"delta": {"content": text}}]}) for text in ("It is", " fine.")
        ]
        body = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    ask("How are you?", "default", 8, serve(answer))
    assert capsys.readouterr().out == "It is fine.\n"


def test_a_refusal_is_the_servers_words_as_one_sentence(serve) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        body = json.dumps({"error": {"message": "The model `x` does not exist."}}).encode()
        handler.send_response(404)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    error = refusal(serve(answer))
    assert error.code is ExitCode.USAGE
    assert (
        error.line() == "the server answered 404: The model `x` does not exist; see `nibble status`"
    )


def test_a_server_that_ends_in_the_middle_of_an_answer_is_one_line(serve) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"ff\r\ndata: {")  # less than it announces

    error = refusal(serve(answer))
    assert error.code is ExitCode.ENGINE_DIED
    assert "ended early (IncompleteRead)" in error.line()


def test_nobody_listening_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    error = refusal({"PORT": str(port), "NIBBLE_CACHE_DIR": "/nowhere"})
    assert error.code is ExitCode.ENGINE_DIED
    assert f"no server answers at 127.0.0.1:{port} (Connection refused)" in error.line()


def test_a_key_file_of_another_user_does_not_hide_a_server_that_asks_for_none(
    serve, monkeypatch
) -> None:
    def no_permission(*_: object) -> str:
        raise PermissionError(13, "Permission denied")

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(401)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    environ = serve(answer)
    monkeypatch.setattr("pathlib.Path.is_file", lambda self: True)
    monkeypatch.setattr("pathlib.Path.read_text", no_permission)
    error = refusal(environ)
    assert error.code is ExitCode.USAGE and "set NIBBLE_API_KEY" in error.line()

"""An engine of a server with several models, without vLLM: a thread that answers as its API and
control port do.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_pids = itertools.count(1000)


class StandInEngine:
    """Has the methods of `EngineProcess`. `load_s` passes until it is ready."""

    load_s = 0.1
    ends_at_load_with: int | None = None
    sleep_problem = wake_problem = ""

    def __init__(self, name: str, words: Sequence[str], environ: Mapping[str, str]) -> None:
        self.name, self.words, self.environ = name, list(words), dict(environ)
        self.pid, self.control_port, self.error = next(_pids), 1, ""
        self.code: int | None = None
        self.loaded_at = time.monotonic() + self.load_s
        self.asked: list[dict[str, Any]] = []
        self.turns: list[str] = []
        self.aborted = threading.Event()
        self.release = threading.Event()
        engine = self

        class Handler(_Handler):
            of = engine

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def ended_with(self) -> int | None:
        if self.ends_at_load_with is not None and time.monotonic() > self.loaded_at:
            self.crash(self.ends_at_load_with)
        return self.code

    def is_ready(self) -> bool:
        return self.code is None and time.monotonic() > self.loaded_at

    def status(self) -> dict[str, Any]:
        return {"state": "ready" if self.is_ready() else "starting", "phase": "load"}

    live = status

    def sleep(self) -> str:
        self.turns.append("sleep")
        return self.sleep_problem

    def wake(self) -> str:
        self.turns.append("wake")
        return self.wake_problem

    def terminate(self) -> None:
        self.crash(0)

    def kill(self) -> None:
        self.crash(-9)

    kill_at_once = kill

    def crash(self, code: int) -> None:
        if self.code is None:
            self.code = code
            self._server.shutdown()
            self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    of: StandInEngine
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/metrics":
            sample = f'vllm:x{{model_name="{self.of.name}"}} 1'
            text = f"# HELP vllm:x Text.\n# TYPE vllm:x gauge\n{sample}\n"
            self._reply(200, text.encode())
        elif self.path == f"/v1/responses/of-{self.of.name}":
            self._reply(200, b'{"id": 1}')
        else:
            self._reply(404, b"{}")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        is_json = "json" in self.headers["Content-Type"]
        asked: dict[str, Any] = json.loads(body) if is_json else {"form": body.decode()}
        self.of.asked.append(asked | {"headers": dict(self.headers), "path": self.path})
        if asked.get("hold"):
            self.of.release.wait(10)
        if asked.get("stream"):
            return self._stream(asked["stream"])
        if asked.get("crash"):
            self.close_connection = True
            return None
        return self._reply(200, json.dumps({"by": self.of.name, "n": len(body)}).encode())

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, pieces: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for number in range(pieces):
                data = f"data: {number}\n\n".encode()
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                time.sleep(0.01)
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.of.aborted.set()
            self.close_connection = True

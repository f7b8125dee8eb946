"""Small HTTP servers that answer in JSON, for the control port and the cluster's agents."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LOCAL_NAMES = ("127.0.0.1", "localhost")


class Server(ThreadingHTTPServer):
    """Binds at once; answers after `start`."""

    daemon_threads = True
    request_queue_size = 64

    def start(self, name: str) -> None:
        """Answer in a thread of that name."""
        serve = self.serve_forever
        threading.Thread(
            target=serve, kwargs={"poll_interval": 0.1}, name=name, daemon=True
        ).start()

    def stop(self) -> None:
        """Stop answering and free the port. Only after `start`."""
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that disconnects."""


class JsonHandler(BaseHTTPRequestHandler):
    """For subclasses: `reply` answers a request. `timeout` (seconds) is theirs to set."""

    protocol_version = "HTTP/1.1"
    server_version = "nibble"
    sys_version = ""

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: health checks and heartbeats every second would fill the log."""

    def reply(self, status: int, data: Mapping[str, Any], with_body: bool = True) -> None:
        """Send a JSON answer and close the connection."""
        body = json.dumps(data, default=str).encode() + b"\n"
        headers = {"Content-Type": "application/json", "Cache-Control": "no-store"}
        self.reply_bytes(status, body, headers, with_body)

    def reply_bytes(
        self, status: int, body: bytes, headers: Mapping[str, str], with_body: bool = True
    ) -> None:
        """Send an answer and close the connection."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if with_body:
            self.wfile.write(body)
        self.close_connection = True

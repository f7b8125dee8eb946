"""nibble's port on every node (AGENT_PORT): JSON over HTTP for clients with the cluster's token.

`call` is the client. With RAY_USE_TLS=1 both ends use Ray's certificates, and the server requires
one from the client.

The server is Python's http.server, as for the control port, and not uvicorn. uvicorn never
disconnects a client that sends half a request; this server does after 30 s. uvicorn answers a
negative length with 400 before the application sees the request; this server answers 413. uvicorn
sends files through Python, which takes 2.6x the CPU of the kernel's sendfile (0.55 s vs 0.21 s per
GiB, 2 cores AMD EPYC, 2026-11-23, benchmarks/agent_transfer.py). Its handlers would need threads
too: one may compute checksums for an hour.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import json
import socket
import ssl
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any

from nibble.errors import ExitCode, NibbleError
from nibble.plan.cluster_ports import AGENT_PORT
from nibble.serve.json_http import JsonHandler, Server

Handler = Callable[[Mapping[str, Any]], dict[str, Any]]
Sender = Callable[[BaseHTTPRequestHandler, str], None]
"""Answers a GET: called with the request handler and the rest of the path."""
_MAX_BODY_BYTES = 1 << 20
_READ_TIMEOUT_S = 30.0
_CONNECT_TIMEOUT_S = 10.0
# An answer may take an hour (a model's checksums). Keepalive still finds a lost peer within half a
# minute.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)


class AgentError(Exception):
    """Why a call failed. `status` is HTTP's, 0 without an answer."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(text)


class Agent:
    """The server. The constructor opens the port; `start` begins to answer.

    `handlers` maps a path to a function from the request's JSON object to the reply's. A handler's
    ValueError becomes status 400 with its text; OSError and NibbleError become 500. Raises CLUSTER
    if the port is taken or the address is not this machine's.
    """

    def __init__(
        self,
        address: str,
        token: str,
        handlers: Mapping[str, Handler],
        files: Mapping[str, Sender] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        try:
            self._server = _Server((address, AGENT_PORT), _Handler)
        except OSError as error:
            what = f"port {AGENT_PORT} of {address} cannot be opened ({error.strerror or error})"
            action = (
                "stop the other node there, or set HEAD_IP or WORKER_IP to an address of this"
                " machine"
            )
            raise NibbleError(
                ExitCode.CLUSTER,
                what=what,
                expected="one node of a cluster on each address",
                action=action,
            ) from None
        self._server.token, self._server.handlers, self._server.files = token, handlers, files or {}
        if context := tls_context(environ or {}, server=True):
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )

    def start(self) -> Agent:
        """Answer in a separate thread."""
        self._server.start("agent")
        return self

    def close(self) -> None:
        """Stop answering and free the port. Call it only after `start`."""
        self._server.stop()


def call(
    address: str,
    path: str,
    token: str,
    body: Mapping[str, Any] | None = None,
    timeout_s: float = 3.0,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The JSON reply of the agent at `address`. Raises AgentError."""
    headers = {
        "Authorization": f"Bearer {token}",
        "Content-Type": "application/json",
        "Connection": "close",
    }
    try:
        with contextlib.closing(connect(address, timeout_s, environ)) as connection:
            connection.request("POST", path, json.dumps(body or {}, default=str), headers)
            response = connection.getresponse()
            data = json.loads(response.read())
    # Before ValueError: a refused certificate is an OSError and a ValueError.
    except (OSError, http.client.HTTPException) as error:
        raise AgentError(
            0, str(getattr(error, "strerror", None) or error) or type(error).__name__
        ) from None
    except ValueError:
        raise AgentError(0, "the server there is not a nibble node") from None
    if response.status != 200:
        raise AgentError(response.status, str(data.get("error")))
    return data


def connect(
    address: str, timeout_s: float, environ: Mapping[str, str] | None
) -> http.client.HTTPConnection:
    """An open connection to the agent at `address`. `timeout_s` limits each read. Raises
    OSError.
    """
    wait_s = min(timeout_s, _CONNECT_TIMEOUT_S)
    if context := tls_context(environ or {}, server=False):
        connection = http.client.HTTPSConnection(
            address, AGENT_PORT, timeout=wait_s, context=context
        )
    else:
        connection = http.client.HTTPConnection(address, AGENT_PORT, timeout=wait_s)
    connection.connect()
    for option in _KEEPALIVE:
        connection.sock.setsockopt(*option)
    connection.sock.settimeout(timeout_s)
    return connection


def tls_context(environ: Mapping[str, str], server: bool) -> ssl.SSLContext | None:
    """TLS from Ray's variables (ray 2.60 _common/tls_utils.py) with certificates on both sides;
    None if RAY_USE_TLS is off.

    Raises CONFIG if a variable is unset or a file cannot be used.
    """
    if environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    names = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
    certificate, key, authority = (environ.get(name) for name in names)
    if not (certificate and key and authority):
        raise NibbleError(
            ExitCode.CONFIG,
            what="RAY_USE_TLS is set",
            expected="also " + ", ".join(names),
            action="set them on every node",
        )
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.load_cert_chain(certificate, key)
        context.load_verify_locations(authority)
    except (OSError, ssl.SSLError) as error:
        what = f"the certificates of RAY_TLS_* cannot be used ({error})"
        raise NibbleError(
            ExitCode.CONFIG, what=what, expected="PEM files", action="correct the paths"
        ) from None
    context.check_hostname = (
        False  # nodes have addresses, not names; only the cluster's authority is trusted
    )
    context.verify_mode = ssl.CERT_REQUIRED
    return context


class _Server(Server):
    token: str
    handlers: Mapping[str, Handler]
    files: Mapping[str, Sender]


class _Handler(JsonHandler):
    server: _Server

    timeout = _READ_TIMEOUT_S

    def do_POST(self) -> None:
        self.reply(*self._answer())

    def do_GET(self) -> None:
        if not self._is_authorized():
            self.reply(401, {"error": "the cluster's token is needed"})
            return
        folder, _, rest = self.path.lstrip("/").partition("/")
        send = self.server.files.get(folder)
        if send is None:
            self.reply(404, {"error": "unknown path"})
        else:
            send(self, rest)

    def _is_authorized(self) -> bool:
        given = self.headers.get("Authorization", "").encode()
        return hmac.compare_digest(given, f"Bearer {self.server.token}".encode())

    def _answer(self) -> tuple[int, dict[str, Any]]:
        if not self._is_authorized():  # before reading the body
            return 401, {"error": "the cluster's token is needed"}
        try:
            length = int(self.headers.get("Content-Length") or 0)
            if not 0 <= length <= _MAX_BODY_BYTES:
                return 413, {"error": "too large"}
            body = json.loads(self.rfile.read(length) or b"{}")
            if not isinstance(body, dict):
                raise ValueError("the body is not a JSON object")
            handler = self.server.handlers.get(self.path)
            return (200, handler(body)) if handler else (404, {"error": "unknown path"})
        except (ValueError, KeyError, TypeError) as error:
            return 400, {"error": str(error)}
        except (OSError, NibbleError) as error:
            return 500, {"error": str(error)}

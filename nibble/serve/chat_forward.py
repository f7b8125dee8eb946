"""The status page's chat on the control port: passes one request to the API and streams the answer.

The page may only talk to the port that it came from. The request keeps the client's key, and the
API's gate checks it: without the key this way is closed too.
"""

from __future__ import annotations

import contextlib
import http.client
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler
from urllib.parse import urlsplit

from nibble.engine.api import Api
from nibble.serve.json_http import LOCAL_NAMES

CHAT_PATH = "/v1/chat/completions"
MAX_BODY_BYTES = 1 << 20
_TIMEOUT_S = 600.0
_PIECE_BYTES = 1 << 16


@dataclass(frozen=True)
class Refusal:
    """An answer instead of a chat."""

    status: int
    message: str


def refusal(headers: Message, api: Api | None) -> Refusal | None:
    """Why a request is not passed on, or None. Pure.

    A page of another origin could send a request here without a preflight, but not with this media
    type; its Origin header shows it too.
    """
    origin = headers.get("Origin")
    if origin is not None and urlsplit(origin).hostname not in LOCAL_NAMES:
        return Refusal(403, "pages of other hosts may not use this port")
    if headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
        return Refusal(415, "the body must be application/json")
    length = headers.get("Content-Length", "")
    if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
        return Refusal(413, f"the body must have 1 to {MAX_BODY_BYTES} bytes")
    return Refusal(503, "the server is not ready") if api is None else None


def forward(handler: BaseHTTPRequestHandler, api: Api) -> None:
    """Pass the request on and stream the answer. A client that leaves ends the request."""
    body = handler.rfile.read(int(handler.headers["Content-Length"]))
    sent = {"Content-Type": "application/json", "Connection": "close"}
    if (key := handler.headers.get("Authorization")) is not None:
        sent["Authorization"] = key
    connection = api.connect(_TIMEOUT_S)
    handler.close_connection = True
    with contextlib.closing(connection):
        try:
            connection.request("POST", CHAT_PATH, body, sent)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException):
            handler.send_error(502, "the API does not answer")
            return
        handler.send_response(answer.status)
        kind = answer.headers.get("Content-Type", "application/json")
        handler.send_header("Content-Type", kind)
        handler.send_header("Cache-Control", "no-store")
        handler.send_header("Connection", "close")
        handler.end_headers()
        with contextlib.suppress(OSError, http.client.HTTPException):
            while piece := answer.read1(_PIECE_BYTES):
                handler.wfile.write(piece)

"""uvicorn's HTTP protocol with limits on the size of a request's head and on the time it takes.

httptools, which uvicorn 0.54 prefers, does not limit the head: a header of 100 MB stalls it for
seconds, because it joins each piece to all pieces before. vLLM's flags
--h11-max-incomplete-event-size and --h11-max-header-count apply only to h11 (vllm 0.32
launchers/launcher.py serve_http); this protocol applies them too. It extends uvicorn's
protocols/http/httptools_impl.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nibble.engine.guard.refusal import Refused, error_body

if TYPE_CHECKING:
    from nibble.engine.guard.connections import Connections

_USED = (
    "connection_made",
    "connection_lost",
    "data_received",
    "on_message_begin",
    "on_headers_complete",
    "on_body",
    "on_message_complete",
    "on_response_complete",
    "send_400_response",
    "handle_websocket_upgrade",
    "_should_upgrade",
)
# How long to read and discard the rest of a refused request: if the server closes a connection with
# unread data, the client may lose the answer (RFC 9112 section 9.6).
LINGER_S = 2.0


class MissingAttribute(Exception):
    """uvicorn or vLLM lacks an attribute that the guard uses."""


def httptools_config(app: Any) -> Any:
    """The uvicorn config of vLLM's server. Raises MissingAttribute if it lacks what this needs."""
    server = getattr(getattr(app, "state", None), "server", None)
    if server is None:
        raise MissingAttribute(
            "nibble's request guard: vLLM's app has no app.state.server (vllm 0.32 has)"
        )
    config = server.config
    protocol_class = getattr(config, "http_protocol_class", None)
    if protocol_class is not HttpToolsProtocol:
        raise MissingAttribute(
            f"nibble's request guard: uvicorn's http_protocol_class is {protocol_class!r}, not"
            " HttpToolsProtocol"
        )
    if not hasattr(config, "ws_max_size"):
        raise MissingAttribute("nibble's request guard: uvicorn's Config has no ws_max_size")
    if missing := [name for name in _USED if not hasattr(HttpToolsProtocol, name)]:
        raise MissingAttribute(
            f"nibble's request guard: uvicorn's HttpToolsProtocol has no {missing[0]}"
        )
    return config


class GuardedProtocol(HttpToolsProtocol):
    """One connection.

    deadline, waits_since: times of the event loop in seconds, which `Connections.sweep` reads.
    """

    def __init__(self, *args: Any, guard: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._guard = guard
        self._max_head_bytes: int = self.config.h11_max_incomplete_event_size or 1 << 16
        self._max_headers: int = getattr(self.config, "h11_max_header_count", 256)
        self._stage: Literal["head", "body", "whole", "idle", "refused"] = "head"
        self._head_bytes = self._piece_bytes = self._quiet_bytes = 0
        self._has_message_ended = False
        self._problem: Refused | None = None
        self._body_deadline = math.inf
        self.address = ""
        self.deadline = self.waits_since = math.inf

    # --- the connection ---

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._start_head()
        if not self._guard.add(self):
            self._refuse(Refused(503, "The server has too many connections; try again later."))

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.remove(self)
        super().connection_lost(exc)

    def expire(self, why: Literal["late", "draining"]) -> None:
        """Close the connection: the request did not arrive in time, or the server drains."""
        sent_something = self._head_bytes or self._stage == "body"
        if self._stage == "refused" or self._is_answering() or not sent_something:
            self.transport.close()
        elif why == "draining":
            self._refuse(Refused(503, "The server is draining."))
        else:
            part = "body" if self._stage == "body" else "head"
            self._refuse(Refused(408, f"The {part} of the request did not arrive in time."))

    # --- receiving ---

    def data_received(self, data: bytes) -> None:
        if self._stage == "refused":
            return
        if self._stage in ("body", "idle"):
            self._extend_deadline()
        self._piece_bytes = len(data)
        self._quiet_bytes += len(data)
        self._has_message_ended = False
        super().data_received(data)
        if self._stage == "head" and not self._has_message_ended:
            self._head_bytes += len(data)
            if self._head_bytes > self._max_head_bytes:
                self._refuse(self._head_too_large())
        elif self._stage == "body" and self._quiet_bytes - len(data) > self._max_head_bytes:
            self._refuse(self._head_too_large())

    def on_body(self, body: bytes) -> None:
        """Reset the count of bytes that are not body: chunk extensions and trailers.

        Their size has the same limit as a head.
        """
        self._quiet_bytes = 0
        super().on_body(body)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._stage == "idle":
            self._start_head()
        self._stage, self._head_bytes = "head", 0

    def on_headers_complete(self) -> None:
        if len(self.headers) > self._max_headers or self._are_headers_too_large():
            self._problem = self._head_too_large()
            raise self._problem  # httptools wraps it, uvicorn calls send_400_response
        super().on_headers_complete()
        parser: Any = self.parser
        # A websocket's handshake still needs the headers. Otherwise the parser appends a chunked
        # body's trailers to a new list, which vLLM does not read; the request keeps the old list.
        if not (parser.should_upgrade() and self._should_upgrade()):
            self.headers = []
        self._start_body()

    def _are_headers_too_large(self) -> bool:
        """Whether the head exceeds the limit. Adds up the headers only if enough bytes arrived."""
        if self._head_bytes + self._piece_bytes <= self._max_head_bytes:
            return False
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        return size > self._max_head_bytes

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._guard.has_request(self)
        self._stage, self._head_bytes, self._has_message_ended = "whole", 0, True
        if self.cycle is not None and self.cycle.response_complete:
            self._wait_for_next()

    def on_response_complete(self) -> None:
        """Set the next deadline.

        Requests may be pipelined: `self.cycle` belongs to the last request whose headers arrived,
        which is not always the one that was answered.
        """
        super().on_response_complete()
        # An answer before the end of the body is a refusal: the rest is read for LINGER_S.
        if self._stage == "body" and self.cycle.response_complete:
            self._body_deadline = self.loop.time() + LINGER_S
            self._extend_deadline()
        elif self._stage == "body" and not self.pipeline:  # a pipelined request without its body
            self._start_body()
            self._guard.wait_for_request(self)
        elif self._stage == "whole" and self.cycle.response_complete:
            self._wait_for_next()
        elif self._stage == "head" and self.cycle.response_complete:
            self._start_head()
            self._guard.wait_for_request(self)

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection over to the websocket; it counts until it is closed."""
        self._guard.has_request(self)
        super().handle_websocket_upgrade()
        protocol = self.transport.get_protocol()
        connection_lost = protocol.connection_lost

        def lost(exc: Exception | None) -> None:
            self._guard.remove(self)
            connection_lost(exc)

        protocol.connection_lost = lost

    # --- deadlines, which apply while the connection waits for a whole request ---

    def _start_head(self) -> None:
        self.waits_since = self.loop.time()
        self.deadline = self.waits_since + self._guard.limits.head_seconds

    def _start_body(self) -> None:
        self._stage, self._quiet_bytes = "body", 0
        self._body_deadline = self.loop.time() + self._guard.limits.body_seconds
        self._extend_deadline()

    def _wait_for_next(self) -> None:
        """Set the deadline for the next request.

        uvicorn's keep-alive timer does not run if the answer came before the end of the request.
        """
        self._stage, self.waits_since = "idle", self.loop.time()
        self.deadline = self.waits_since + self.timeout_keep_alive
        self._guard.wait_for_request(self)

    def _extend_deadline(self) -> None:
        limits, now = self._guard.limits, self.loop.time()
        if self._stage == "body":
            self.deadline = min(now + limits.body_gap_seconds, self._body_deadline)
        else:  # idle: empty lines may arrive before the next request
            self.deadline = min(now + limits.head_seconds, self.deadline)

    # --- refusals ---

    def _head_too_large(self) -> Refused:
        return Refused(
            431,
            f"The headers are larger than {self._max_head_bytes} bytes or more than"
            f" {self._max_headers} (NIBBLE_MAX_HEADER_BYTES, NIBBLE_MAX_HEADERS).",
        )

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._problem or Refused(400, msg))

    def _refuse(self, refused: Refused) -> None:
        """Answer without the app, tell the app that the client disconnected, and close later."""
        if self._is_answering():  # a client would read a second answer as part of the first
            self._stage = "refused"
            return self.transport.abort()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._stage = "refused"
        self.deadline = self.loop.time() + LINGER_S
        self._guard.wait_for_request(self)
        if not self.transport.is_closing():
            self.transport.write(_raw_answer(refused))
            if self.transport.can_write_eof():
                self.transport.write_eof()
        return None

    def _is_answering(self) -> bool:
        """Whether an answer is being sent, or was sent before the end of its request."""
        cycle = self.cycle  # None before the first request
        if cycle is None:
            return False
        is_open = cycle.response_started and (self._stage == "body" or not cycle.response_complete)
        # A pipelined request waits for the answer to the request before.
        return is_open or bool(self.pipeline)


def _raw_answer(refused: Refused) -> bytes:
    body = error_body(refused.status, refused.kind, str(refused))
    phrase = refused.kind.removesuffix("Error")
    head = (
        f"HTTP/1.1 {refused.status} {phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body

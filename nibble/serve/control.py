"""The control port: /status and /ready on loopback, answered before and during the engine's run.

Health checks and users on the same machine read it. It never leaves 127.0.0.1 and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nibble.errors import ExitCode, NibbleError
from nibble.serve.json_http import JsonHandler, Server

ADDRESS = "127.0.0.1"
# A web page could reach loopback through its DNS name (DNS rebinding); its Host header
# shows it.
_HOST_NAMES = ("127.0.0.1", "localhost")
_READ_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Answers:
    """`status` gives /status as plain data; `is_ready` decides /ready, and `why` gives the reason.

    All run in request threads.
    """

    status: Callable[[], dict[str, Any]]
    is_ready: Callable[[], bool]
    why: Callable[[], str] = str


class ControlServer:
    """Binds at once; answers after `start`. Raises NibbleError(CONFIG) if the port is in use."""

    def __init__(
        self,
        port: int,
        status: Callable[[], dict[str, Any]],
        is_ready: Callable[[], bool],
        why: Callable[[], str] = str,
    ) -> None:
        try:
            self._server = _Server((ADDRESS, port), _Handler)
        except OSError as error:
            what = f"control port {port} cannot be opened on {ADDRESS} ({error.strerror or error})"
            raise NibbleError(
                ExitCode.CONFIG,
                what=what,
                expected="a free port",
                action="set NIBBLE_CONTROL_PORT to another port",
            ) from None
        self.answers = Answers(status, is_ready, why)

    @property
    def answers(self) -> Answers:
        """The current answers of /status and /ready. The port stays open while they change."""
        return self._server.answers

    @answers.setter
    def answers(self, answers: Answers) -> None:
        self._server.answers = answers

    @property
    def port(self) -> int:
        """The port in use, also for 0."""
        return self._server.server_address[1]

    def start(self) -> None:
        """Answer in a separate thread."""
        self._server.start("control")

    def close(self) -> None:
        """Stop answering and free the port. Only after `start`."""
        self._server.stop()


class Turn:
    """A ControlServer that stays open over several runs, lent to one run until `close`."""

    def __init__(self, server: ControlServer, answers: Answers) -> None:
        self._server, self._own, self._before = server, answers, server.answers

    def start(self) -> None:
        """Answer for this run."""
        self._server.answers = self._own

    def close(self) -> None:
        """Return to the owner's answers."""
        self._server.answers = self._before


class _Server(Server):
    answers: Answers


class _Handler(JsonHandler):
    server: _Server

    timeout = _READ_TIMEOUT_S

    def do_GET(self) -> None:
        self.reply(*self._answer())

    def do_HEAD(self) -> None:
        self.reply(*self._answer(), with_body=False)

    def _answer(self) -> tuple[int, dict[str, Any]]:
        if not self._host_is_local():
            return 403, {"error": "the Host header must be localhost or 127.0.0.1"}
        path, answers = self.path.partition("?")[0], self.server.answers
        if path == "/status":
            return 200, answers.status()
        if path == "/ready":
            ready = answers.is_ready()
            return (
                (200, {"ready": True})
                if ready
                else (503, {"ready": False, "reason": answers.why()})
            )
        return 404, {"error": "this port has only /status and /ready"}

    def _host_is_local(self) -> bool:
        name = self.headers.get("Host", "").rpartition(":")
        host = name[0] if name[1] and name[2].isdigit() else self.headers.get("Host", "")
        return host.strip().lower() in _HOST_NAMES

"""The control port: status, readiness and the status page on loopback, before and during the
engine's run.

Health checks and users on the same machine read it. It never leaves 127.0.0.1 and changes nothing.
The page's chat goes to the API through it, and the API's gate asks for the key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nibble.engine.api import Api
from nibble.engine.page.files import HEADERS, LIVE_PATH, PAGE_PATH, STATUS_PATH, page_file
from nibble.errors import ExitCode, NibbleError
from nibble.serve.chat_forward import CHAT_PATH, forward, refusal
from nibble.serve.json_http import LOCAL_NAMES, JsonHandler, Server
from nibble.serve.live import live_without_engine, metrics_text

ADDRESS = "127.0.0.1"
_READ_TIMEOUT_S = 5.0
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Answers:
    """`status` gives /status as plain data; `is_ready` decides /ready, and `why` gives the reason.

    `live` gives the page's data and `metrics` nibble's metrics; None: from `status`. `api`
    answers the page's chat; None: there is none yet. All run in request threads.
    """

    status: Callable[[], dict[str, Any]]
    is_ready: Callable[[], bool]
    why: Callable[[], str] = str
    live: Callable[[], dict[str, Any]] | None = None
    metrics: Callable[[], str] | None = None
    api: Api | None = None


class ControlServer:
    """Binds at once; answers after `start`. Raises NibbleError(CONFIG) if the port is in use."""

    def __init__(
        self,
        port: int,
        status: Callable[[], dict[str, Any]],
        is_ready: Callable[[], bool],
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
        self.answers = Answers(status, is_ready)

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
        self._answer()

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_POST(self) -> None:
        api = self.server.answers.api
        if self.path != CHAT_PATH:
            self.send_error(501)
        elif not self._host_is_local():
            self._refuse_host()
        elif (refused := refusal(self.headers, api)) is not None:
            self.reply(refused.status, {"error": {"message": refused.message}})
        elif api is not None:
            forward(self, api)

    def _answer(self, with_body: bool = True) -> None:
        if not self._host_is_local():
            return self._refuse_host(with_body)
        path, answers = self.path.partition("?")[0], self.server.answers
        if (file := page_file(PAGE_PATH if path == "/" else path)) is not None:
            headers = {**dict(HEADERS), "Content-Type": file.content_type}
            return self.reply_bytes(200, file.body, headers, with_body)
        if path == "/metrics":
            text = answers.metrics() if answers.metrics else metrics_text(answers.status(), 0)
            headers = {"Content-Type": METRICS_TYPE, "Cache-Control": "no-store"}
            return self.reply_bytes(200, text.encode(), headers, with_body)
        return self.reply(*self._data(path, answers), with_body)

    def _data(self, path: str, answers: Answers) -> tuple[int, dict[str, Any]]:
        if path in ("/status", STATUS_PATH):
            return 200, answers.status()
        if path == LIVE_PATH:
            live = answers.live
            return 200, live() if live else live_without_engine(answers.status())
        if path == "/ready":
            if answers.is_ready():
                return 200, {"ready": True}
            return 503, {"ready": False, "reason": answers.why()}
        return 404, {"error": "this port has only /, /status, /ready and /metrics"}

    def _refuse_host(self, with_body: bool = True) -> None:
        error = {"error": "the Host header must be localhost or 127.0.0.1"}
        self.reply(403, error, with_body)

    def _host_is_local(self) -> bool:
        # A web page could reach loopback through its DNS name (DNS rebinding); its Host header
        # shows it.
        name = self.headers.get("Host", "").rpartition(":")
        host = name[0] if name[1] and name[2].isdigit() else self.headers.get("Host", "")
        return host.strip().lower() in LOCAL_NAMES

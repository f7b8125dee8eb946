"""The server in front of several engines: uvicorn in a thread, with nibble's gate and limits."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import uvicorn

from nibble.engine.gate.asgi import Answer, App, Caller, Gate, judge
from nibble.engine.gate.routes import READY_PATH
from nibble.engine.guard.connections import guard_connections
from nibble.engine.router.app import Router

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_BACKLOG = 2048
_KEEP_ALIVE_S = 5  # as vLLM's
_HEADER_BYTES, _HEADERS = 65536, 128
_STOP_S = 5.0


class FrontGate(Gate):
    """The gate of one engine, but the engines check bodies, and `/ready` waits for all models that
    stay loaded.
    """

    def __init__(
        self, app: App, environ: Mapping[str, str], missing: Callable[[], list[str]]
    ) -> None:
        super().__init__(app, environ)
        self._missing = missing
        self.server: Any = None

    def _judge(self, verb: str, path: str, canonical: bool, caller: Caller) -> Answer | None:
        state, phase = self._state.get()
        if path == READY_PATH and state == "ready" and (missing := self._missing()):
            state, phase = "starting", f"loading {', '.join(missing)}"
        return judge(verb, path, canonical, caller, state, phase)

    async def _guarded(self, scope: Message, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)

    async def _lifespan(self, scope: Message, receive: Receive, send: Send) -> None:
        holder = SimpleNamespace(state=SimpleNamespace(server=self.server))
        guard_connections(holder, self._guard.limits, self._state)
        await self.app(scope, receive, send)


class Front:
    """Listens at once on `listener`; answers after `start`."""

    def __init__(
        self,
        listener: socket.socket,
        router: Router,
        environ: Mapping[str, str],
        missing: Callable[[], list[str]],
    ) -> None:
        self._listener = listener
        gate = FrontGate(router, environ, missing)
        config = uvicorn.Config(
            gate,
            http="httptools",
            loop="uvloop",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            date_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            h11_max_incomplete_event_size=int(
                environ.get("NIBBLE_MAX_HEADER_BYTES") or _HEADER_BYTES
            ),
        )
        config.h11_max_header_count = int(environ.get("NIBBLE_MAX_HEADERS") or _HEADERS)  # type: ignore[attr-defined]
        self._server = gate.server = uvicorn.Server(config)
        self._runs = threading.Event()
        self._thread = threading.Thread(target=self._run, name="front", daemon=True)
        self.loop: asyncio.AbstractEventLoop
        self.error: BaseException | None = None

    def start(self) -> None:
        """Answer in a separate thread."""
        self._thread.start()
        self._runs.wait()

    def stop(self) -> None:
        """End; connections that still answer get a moment."""
        self._server.should_exit = True
        self._thread.join(_STOP_S)
        self._server.force_exit = True
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        try:
            import uvloop

            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                self.loop = runner.get_loop()
                runner.run(self._serve())
        except BaseException as error:  # shown by the main thread
            self.error = error
        finally:
            self._runs.set()

    async def _serve(self) -> None:
        asyncio.get_running_loop().call_soon(self._runs.set)
        await self._server.serve(sockets=[self._listener])

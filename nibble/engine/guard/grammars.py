"""Compiles structured outputs in a separate process, and refuses those that cost too much.

vLLM 0.32 reads a grammar on the event loop of its API process and compiles it in a thread of its
engine, both without a limit: `{"type": "array", "minItems": 1000000000}` takes all memory of the
machine. The worker (grammar_worker.py) has limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import marshal
import os
import signal
import socket
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from nibble.engine.guard import grammar_worker
from nibble.engine.guard.frames import MARSHAL_VERSION, packed, unpacked
from nibble.engine.guard.grammar_fields import grammar_fields
from nibble.engine.guard.grammar_worker import Limits

REMEMBERED = 4096  # results, 100 bytes each and their reasons
SLOW_SECONDS = 60.0  # a refusal for time is remembered so long: the machine may have been busy
WAITING = 256  # different grammars at a time; more are refused with 503
WAITING_BYTES = 32 << 20
PATIENCE_SECONDS = 10.0  # for a turn in the worker; then 503
_START_SECONDS = 20.0
_CHEAP_SECONDS = 0.005
_LOOP_SHARE = 4  # one part in four of the event loop's time for what vLLM reads there again


class Problem(str):
    """Why a request is refused, with the HTTP status."""

    status: int
    is_of_time: bool

    def __new__(cls, text: str, status: int = 400, is_of_time: bool = False) -> Problem:
        problem = super().__new__(cls, text)
        problem.status, problem.is_of_time = status, is_of_time
        return problem


class Grammars:
    """One for each API process. It starts its worker with the first request that has a
    structured output.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._results: OrderedDict[bytes, Problem | float] = OrderedDict()
        self._running: dict[bytes, asyncio.Future[Problem | float]] = {}
        self._asked: dict[int, asyncio.Future[tuple[str, str, float]]] = {}
        self._pace = asyncio.Lock()
        self._paced = 0
        self._number = 0
        self._waiting_bytes = 0
        self._pid = 0
        self._socket: socket.socket | None = None
        self._reader: asyncio.Task[None] | None = None
        self._sending = asyncio.Lock()

    async def problem(self, path: str, body: Mapping[str, Any], app: Any) -> Problem | None:
        """None: vLLM may have it. `app` is that of vLLM's API server."""
        fields = grammar_fields(path, body)
        if fields is None:
            return None
        try:
            job = marshal.dumps((path, fields), MARSHAL_VERSION)
        except ValueError:
            return Problem("Structured outputs or tools nest too deeply.")
        if len(job) > (most := self._limits.input_bytes):
            return Problem(
                f"Structured outputs and tools take {len(job)} bytes; expected at most {most}"
                " (NIBBLE_GRAMMAR_BYTES)."
            )
        key = hashlib.blake2b(job, digest_size=16).digest()
        if key in self._results:
            self._results.move_to_end(key)
            result = self._results[key]
        else:
            result = await self._shared(key, path, fields, app)
        return result if isinstance(result, Problem) else await self._let_through(result)

    async def _let_through(self, loop_seconds: float) -> Problem | None:
        """Space requests out whose grammars vLLM needs long to read on its event loop, in each
        request anew.
        """
        if loop_seconds <= _CHEAP_SECONDS:
            return None
        if self._paced * loop_seconds * _LOOP_SHARE > PATIENCE_SECONDS:
            return _crowded()
        self._paced += 1
        try:
            async with self._pace:
                await asyncio.sleep(loop_seconds * _LOOP_SHARE)
        finally:
            self._paced -= 1
        return None

    async def _shared(
        self, key: bytes, path: str, fields: dict[str, Any], app: Any
    ) -> Problem | float:
        """One compile for all requests that ask for the same at a time; the seconds that vLLM's
        event loop will need.
        """
        if key not in self._running:
            if len(self._running) >= WAITING or self._waiting_bytes > WAITING_BYTES:
                return _crowded()
            task = asyncio.ensure_future(self._compiled(path, fields, app))
            self._running[key] = task
            task.add_done_callback(lambda done: self._keep(key, done))
        # A client that leaves ends its own wait alone
        return await asyncio.shield(self._running[key])

    def _keep(self, key: bytes, done: asyncio.Future[Problem | float]) -> None:
        del self._running[key]
        if done.cancelled() or done.exception() is not None:
            return
        result = done.result()
        if not isinstance(result, Problem) or result.status == 400:
            self._results[key] = result
            if len(self._results) > REMEMBERED:
                self._results.popitem(last=False)
        if isinstance(result, Problem) and result.is_of_time:
            asyncio.get_running_loop().call_later(SLOW_SECONDS, self._results.pop, key, None)

    async def _compiled(self, path: str, fields: dict[str, Any], app: Any) -> Problem | float:
        what, text, loop_seconds = await self._ask(path, fields, app)
        if what == "served":
            return loop_seconds
        if what in ("refused", "slow"):
            return Problem(f"This structured output is refused. {text}", is_of_time=what == "slow")
        limits = self._limits
        if what == "time":
            return Problem(
                f"This structured output takes more than {limits.seconds:g} s of CPU time to"
                " compile. Make it smaller: fewer values in enum and choice, smaller bounds of"
                " repetitions and lengths, less nesting.",
                is_of_time=True,
            )
        if what == "memory":
            return Problem(
                f"This structured output needs more than {limits.memory_mib} MiB to compile. Make"
                " it smaller: smaller bounds of repetitions and lengths, fewer values, less"
                " nesting."
            )
        if what == "crashed":
            return Problem(f"This structured output crashes its compiler ({text}).")
        if what == "busy":
            return _crowded()
        return Problem(
            f"The server could not check this structured output ({text}). Send it again.", 503
        )

    async def _ask(self, path: str, fields: dict[str, Any], app: Any) -> tuple[str, str, float]:
        if self._socket is None:
            try:
                self._start(app)
            except OSError as error:
                return "failed", error.strerror or "", 0.0
        assert self._socket is not None
        self._number += 1
        number = self._number
        answer = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        give_up = time.monotonic() + PATIENCE_SECONDS
        job = packed((number, path, fields, give_up))
        self._waiting_bytes += len(job)
        try:
            async with asyncio.timeout(
                _START_SECONDS + PATIENCE_SECONDS + self._limits.longest_seconds
            ):
                async with self._sending:
                    await asyncio.get_running_loop().sock_sendall(self._socket, job)
                return await answer
        except (OSError, TimeoutError) as error:
            self._stop()
            return "failed", type(error).__name__, 0.0
        finally:
            self._waiting_bytes -= len(job)
            self._asked.pop(number, None)

    def _start(self, app: Any) -> None:
        self._pid, self._socket = grammar_worker.start(app, self._limits)
        self._reader = asyncio.ensure_future(self._read(self._socket))

    async def _read(self, connection: socket.socket) -> None:
        """Pass the worker's answers on; once it is gone, what waits fails, and the next request
        starts another.
        """
        loop = asyncio.get_running_loop()
        received = bytearray()
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(connection, 1 << 16):
                received += data
                for answer in unpacked(received):
                    self._pass_on(*answer)
        if self._socket is connection:  # not the next worker's
            self._stop()

    def _pass_on(self, number: int, what: str, text: str, loop_seconds: float = 0.0) -> None:
        waiting = self._asked.values() if number == -1 else filter(None, [self._asked.get(number)])
        for answer in waiting:
            if not answer.done():
                answer.set_result((what, text, loop_seconds))

    def _stop(self) -> None:
        connection, self._socket = self._socket, None
        if connection is None:
            return
        connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        self._pass_on(-1, "failed", "the worker ended")


def _crowded() -> Problem:
    return Problem(
        "The server is too busy to compile this structured output. Send the request again later.",
        503,
    )

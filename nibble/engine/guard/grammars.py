"""Compiles structured outputs in a separate process, and refuses those that cost too much.

vLLM 0.32 reads a grammar on the event loop of its API process and compiles it in a thread of its
engine, both without a limit: `{"type": "array", "minItems": 1000000000}` takes all memory of the
machine. So each grammar is first compiled in a worker with limits (grammar_worker.py).
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

REMEMBERED = 4096  # results in the cache, 100 bytes each plus the reason of a refusal
SLOW_SECONDS = 60.0  # how long a refusal for time is remembered: the machine may have been busy
WAITING = 256  # different grammars that wait at a time; more are refused with 503
WAITING_BYTES = 32 << 20
PATIENCE_SECONDS = 10.0  # longest wait for a turn in the worker; then 503
_START_SECONDS = 20.0  # allowed for starting the worker
_CHEAP_SECONDS = 0.005  # a grammar that vLLM reads in less time needs no spacing
# vLLM reads the grammar again on its event loop: requests are spaced so that this takes at most one
# part in four of the loop's time.
_LOOP_SHARE = 4


class Problem(str):
    """The reason why a request is refused.

    status: of HTTP; is_of_time: the reason is CPU time, which another try may not exceed.
    """

    status: int
    is_of_time: bool

    def __new__(cls, text: str, status: int = 400, is_of_time: bool = False) -> Problem:
        problem = super().__new__(cls, text)
        problem.status, problem.is_of_time = status, is_of_time
        return problem


class Grammars:
    """Checks the structured outputs of one API process.

    The first request with a structured output starts the worker.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._results: OrderedDict[bytes, Problem | float] = OrderedDict()
        self._running: dict[bytes, asyncio.Future[Problem | float]] = {}
        self._jobs: dict[int, asyncio.Future[tuple[str, str, float]]] = {}  # by number
        self._pace = asyncio.Lock()
        self._paced = 0  # requests that wait for the lock or hold it
        self._number = 0
        self._waiting_bytes = 0
        self._pid = 0
        self._socket: socket.socket | None = None
        self._reader: asyncio.Task[None] | None = None
        self._sending = asyncio.Lock()

    async def problem(self, path: str, body: Mapping[str, Any], app: Any) -> Problem | None:
        """The reason to refuse the request with `body` on the route `path`, or None.

        app: of vLLM's API server.
        """
        fields = grammar_fields(path, body)
        if fields is None:
            return None
        try:
            job = marshal.dumps((path, fields), MARSHAL_VERSION)
        except ValueError:
            return Problem("Structured outputs or tools nest too deeply.")
        if len(job) > (limit := self._limits.input_bytes):
            return Problem(
                f"Structured outputs and tools take {len(job)} bytes; expected at most {limit}"
                " (NIBBLE_GRAMMAR_BYTES)."
            )
        key = hashlib.blake2b(job, digest_size=16).digest()
        if key in self._results:
            self._results.move_to_end(key)
            result = self._results[key]
        else:
            result = await self._compile_once(key, path, fields, app)
        return result if isinstance(result, Problem) else await self._space_out(result)

    async def _space_out(self, loop_seconds: float) -> Problem | None:
        """Delay a request whose grammar takes vLLM's event loop `loop_seconds` to read.

        vLLM reads the grammar again in every request.
        """
        if loop_seconds <= _CHEAP_SECONDS:
            return None
        if self._paced * loop_seconds * _LOOP_SHARE > PATIENCE_SECONDS:
            return _too_busy()
        self._paced += 1
        try:
            async with self._pace:
                await asyncio.sleep(loop_seconds * _LOOP_SHARE)
        finally:
            self._paced -= 1
        return None

    async def _compile_once(
        self, key: bytes, path: str, fields: dict[str, Any], app: Any
    ) -> Problem | float:
        """Compile once for all requests that wait for the same grammar.

        Returns the seconds that vLLM's event loop will take to read the grammar, or a Problem.
        """
        if key not in self._running:
            if len(self._running) >= WAITING or self._waiting_bytes > WAITING_BYTES:
                return _too_busy()
            task = asyncio.ensure_future(self._compile(path, fields, app))
            self._running[key] = task
            task.add_done_callback(lambda done: self._remember(key, done))
        # A client that disconnects ends only its wait, not the compile.
        return await asyncio.shield(self._running[key])

    def _remember(self, key: bytes, done: asyncio.Future[Problem | float]) -> None:
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

    async def _compile(self, path: str, fields: dict[str, Any], app: Any) -> Problem | float:
        outcome, text, loop_seconds = await self._ask_worker(path, fields, app)
        if outcome == "served":
            return loop_seconds
        if outcome in ("refused", "slow"):
            reason = f"This structured output is refused. {text}"
            return Problem(reason, is_of_time=outcome == "slow")
        limits = self._limits
        if outcome == "time":
            return Problem(
                f"This structured output takes more than {limits.seconds:g} s of CPU time to"
                " compile. Make it smaller: fewer values in enum and choice, smaller bounds of"
                " repetitions and lengths, less nesting.",
                is_of_time=True,
            )
        if outcome == "memory":
            return Problem(
                f"This structured output needs more than {limits.memory_mib} MiB to compile. Make"
                " it smaller: smaller bounds of repetitions and lengths, fewer values, less"
                " nesting."
            )
        if outcome == "crashed":
            return Problem(f"This structured output crashes its compiler ({text}).")
        if outcome == "busy":
            return _too_busy()
        return Problem(
            f"The server could not check this structured output ({text}). Send it again.", 503
        )

    async def _ask_worker(
        self, path: str, fields: dict[str, Any], app: Any
    ) -> tuple[str, str, float]:
        """(outcome, text, seconds on the event loop) of grammar_worker.Worker, or "failed"."""
        if self._socket is None:
            try:
                self._start(app)
            except OSError as error:
                return "failed", error.strerror or "", 0.0
        assert self._socket is not None
        self._number += 1
        number = self._number
        answer = asyncio.get_running_loop().create_future()
        self._jobs[number] = answer
        start_before = time.monotonic() + PATIENCE_SECONDS
        job = packed((number, path, fields, start_before))
        self._waiting_bytes += len(job)
        timeout_s = _START_SECONDS + PATIENCE_SECONDS + self._limits.longest_seconds
        try:
            async with asyncio.timeout(timeout_s):
                async with self._sending:
                    await asyncio.get_running_loop().sock_sendall(self._socket, job)
                return await answer
        except (OSError, TimeoutError) as error:
            self._stop()
            return "failed", type(error).__name__, 0.0
        finally:
            self._waiting_bytes -= len(job)
            self._jobs.pop(number, None)

    def _start(self, app: Any) -> None:
        self._pid, self._socket = grammar_worker.start(app, self._limits)
        self._reader = asyncio.ensure_future(self._read(self._socket))

    async def _read(self, connection: socket.socket) -> None:
        """Pass the worker's answers on until it ends.

        Then all waiting jobs fail, and the next request starts another worker.
        """
        loop = asyncio.get_running_loop()
        received = bytearray()
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(connection, 1 << 16):
                received += data
                for answer in unpacked(received):
                    self._pass_on(*answer)
        if self._socket is connection:  # and not already replaced by the next worker's
            self._stop()

    def _pass_on(self, number: int, outcome: str, text: str, loop_seconds: float = 0.0) -> None:
        """Answer the job `number`, or all jobs if it is -1."""
        jobs = self._jobs.values() if number == -1 else filter(None, [self._jobs.get(number)])
        for answer in jobs:
            if not answer.done():
                answer.set_result((outcome, text, loop_seconds))

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


def _too_busy() -> Problem:
    return Problem(
        "The server is too busy to compile this structured output. Send the request again later.",
        503,
    )

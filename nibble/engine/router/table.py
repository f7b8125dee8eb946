"""The models behind one port and their states, shared by the router and the loop that loads them.

The router runs in the event loop's thread, the other in the main thread: each change of an entry
holds the lock, for a microsecond.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nibble.engine.guard.refusal import Refused
from nibble.engine.router.upstream import Upstream

ModelState = Literal["unloaded", "loading", "ready", "unloading", "asleep", "holding", "failed"]
DEFAULT = "default"


@dataclass(eq=False)
class Entry:
    """One model. `model` names it to people; `names` are all that a request may use.

    `running` counts admitted requests; `is_leaving` keeps new ones waiting, so that it becomes
    idle.
    """

    model: str
    names: tuple[str, ...]
    state: ModelState = "unloaded"
    reason: str = ""
    running: int = 0
    last_used_s: float = 0.0
    is_leaving: bool = False
    upstream: Upstream | None = None
    waiters: deque[asyncio.Future[None]] = field(default_factory=deque)

    @property
    def admits(self) -> bool:
        return self.state == "ready" and not self.is_leaving


class Table:
    """All entries; the first is also `default`. `wake` tells the main thread of a new wish."""

    def __init__(
        self,
        entries: Sequence[Entry],
        wake: Callable[[], None],
        wait_s: float,
        max_waiting: int,
    ) -> None:
        self.entries = tuple(entries)
        self._wake, self._wait_s, self._max_waiting = wake, wait_s, max_waiting
        self._lock = threading.Lock()
        self._by_name = {name: entry for entry in self.entries for name in entry.names}
        self._by_name[DEFAULT] = self.entries[0]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def find(self, name: str | None) -> Entry | None:
        """The entry of a request's `model`; the first without one, as vLLM does."""
        return self.entries[0] if name is None else self._by_name.get(name)

    def known_names(self) -> list[str]:
        """Every name that a request may use."""
        return list(self._by_name)

    # --- the router's side ---

    async def enter(self, entry: Entry, gone: asyncio.Future[Any]) -> bool:
        """Admit a request, after its model is loaded. False if the client left before.

        Raises Refused where the model cannot be loaded, too many requests wait, or the wait is
        too long. Call `leave` after the request.
        """
        with self._lock:
            if entry.admits:
                entry.running += 1
                return True
            waiter = self._queue(entry)
        self._wake()
        try:
            await asyncio.wait(
                (waiter, gone), timeout=self._wait_s, return_when=asyncio.FIRST_COMPLETED
            )
            if waiter.done():
                waiter.result()  # raises Refused
                return True
            if gone.done():
                return False
            raise Refused(
                503, f"The model {entry.model} was not loaded within {self._wait_s:.0f} s."
            )
        finally:
            self._forget(entry, waiter)

    def _queue(self, entry: Entry) -> asyncio.Future[None]:
        if entry.state in ("failed", "holding"):
            raise Refused(503, f"The model {entry.model} is not available: {entry.reason}.")
        if len(entry.waiters) >= self._max_waiting:
            raise Refused(503, f"Too many requests wait for the model {entry.model}.")
        waiter = asyncio.get_running_loop().create_future()
        entry.waiters.append(waiter)
        return waiter

    def _forget(self, entry: Entry, waiter: asyncio.Future[None]) -> None:
        """Remove a waiter that gave up. One that was admitted meanwhile gives its place back."""
        with self._lock:
            if waiter in entry.waiters:
                entry.waiters.remove(waiter)
            elif not waiter.done():
                waiter.cancel()
                entry.running -= 1

    def leave(self, entry: Entry) -> None:
        """The request ended."""
        with self._lock:
            entry.running -= 1
            entry.last_used_s = time.monotonic()
            is_awaited = entry.is_leaving and not entry.running
        if is_awaited:
            self._wake()

    # --- the main thread's side ---

    def make_ready(self, entry: Entry, upstream: Upstream, loop: asyncio.AbstractEventLoop) -> None:
        """Admit requests, first those that wait."""
        with self._lock:
            entry.upstream, entry.state, entry.reason = upstream, "ready", ""
            entry.is_leaving = False
            entry.last_used_s = time.monotonic()
            waiters, entry.waiters = entry.waiters, deque()
            entry.running += len(waiters)
        for waiter in waiters:
            loop.call_soon_threadsafe(_admit, waiter)

    def set_state(self, entry: Entry, state: ModelState, reason: str = "") -> None:
        """Change the state of a model that admits no request."""
        with self._lock:
            entry.state, entry.reason = state, reason
            entry.is_leaving = False

    def refuse_waiting(self, entry: Entry, reason: str, loop: asyncio.AbstractEventLoop) -> None:
        """Answer requests that wait with 503."""
        with self._lock:
            waiters, entry.waiters = entry.waiters, deque()
            entry.running += len(waiters)  # each leaves as after an answer, see _refuse
        error = Refused(503, f"The model {entry.model} is not available: {reason}.")
        for waiter in waiters:
            loop.call_soon_threadsafe(self._refuse, entry, waiter, error)

    def _refuse(self, entry: Entry, waiter: asyncio.Future[None], error: Refused) -> None:
        if not waiter.done():
            waiter.set_exception(error)
            with self._lock:
                entry.running -= 1

    def begin_leaving(self, entry: Entry) -> bool:
        """Keep new requests waiting; True if no request runs."""
        with self._lock:
            entry.is_leaving = True
            return entry.running == 0

    def stop_leaving(self, entry: Entry, loop: asyncio.AbstractEventLoop) -> None:
        """Admit requests again."""
        if entry.upstream is not None:
            self.make_ready(entry, entry.upstream, loop)


def _admit(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)

"""The memory watchdog of several models: one for the machine, in place of one in each engine.

When memory is short, all requests wait for it at the front. When it runs out, one engine ends, then
after a moment the next one: engines that each watched the machine would all end at once.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from nibble.engine.gate.admission import Admission
from nibble.machine.memory import MemorySource
from nibble.plan.memory import Limits, show_gib
from nibble.serve.fleet.choose import to_end
from nibble.serve.fleet.fleet import Member
from nibble.serve.watchdog import Action, Governor

# The kernel takes the memory of a killed engine back within about a second; until then a reading
# says nothing about the next one.
SETTLE_S = 3.0


class MemoryWatch:
    """`run` in a separate thread until `close`. `act` waits for nothing."""

    def __init__(
        self,
        members: Sequence[Member],
        limit: Limits,
        admission: Admission,
        source: Callable[[], MemorySource] = MemorySource,
    ) -> None:
        self._members, self._limit, self._admission = tuple(members), limit, admission
        self._governor = Governor(source(), limit, self.act, ends_at_stop=False)
        self.run, self.close = self._governor.run, self._governor.close
        self._settled_at = 0.0
        self._told: deque[str] = deque()
        self.is_short = False

    def act(self, action: Action, why: str) -> None:
        """The governor's decision, in its thread."""
        self.is_short = action != "serve"
        if action == "serve":
            if self._admission.change("paused", "ready", ""):
                self._told.append(f"new requests are admitted again: {why}")
            return
        # Every client can read this: no path of a cgroup
        reason = f"memory is short: {show_gib(self._governor.available_bytes)} are available"
        if self._admission.change("ready", "paused", reason):
            self._told.append(f"new requests get 503: {why}")
        if action == "stop" and time.monotonic() >= self._settled_at:
            self._end_one(why)

    def _end_one(self, why: str) -> None:
        alive = {
            one.entry.model: one
            for one in self._members
            if one.process is not None and not one.ended_for_memory
        }
        chosen = to_end([one.loaded() for one in alive.values()])
        if chosen is None:
            return
        member = alive[chosen]
        member.ended_for_memory = f"nibble ended it because memory ran out: {why}"
        if (process := member.process) is not None:
            process.kill_at_once()
        self._settled_at = time.monotonic() + SETTLE_S

    def news(self) -> list[str]:
        """Lines for the log since the last call."""
        found = []
        with contextlib.suppress(IndexError):
            while True:
                found.append(self._told.popleft())
        return found

    def to_json(self) -> dict[str, Any]:
        """The last sample and the limits, for /status."""
        return self._governor.to_json()

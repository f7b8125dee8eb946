"""The memory watchdog: stops admission, then the engine, before the host swaps or the machine
hangs.

`decide` is pure. `Governor` samples in a separate thread that opens no files and waits for no lock,
terminal or other thread, so that it can act when memory is gone.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal

from nibble.machine.memory import Memory, MemorySource
from nibble.plan.memory import Limits, show_gib

Action = Literal["serve", "pause", "stop"]

INTERVAL_S = 0.2
RESUME_AFTER_S = 3.0  # above the limit for so long, so that admission does not flap
# "full avg10" of PSI. systemd-oomd kills at 60 for 30 s; a stall only counts here while the reserve
# is being used.
PAUSE_STALLED_PERCENT, STOP_STALLED_PERCENT = 10.0, 50.0
_NICE = -10
KILL_IS_NEWS_S = 30.0  # vLLM takes some seconds to end after a lost worker


def decide(memory: Memory, limit: Limits, is_paused: bool) -> tuple[Action, str]:
    """The action and its reason in words. A pause ends only above `resume_from_bytes`."""
    is_short = memory.available_bytes < limit.reserve_bytes
    stalled = memory.stalled_percent or 0.0
    left = f"{show_gib(memory.available_bytes)} of memory are available ({memory.limited_by})"
    waiting = f"{left} and all tasks waited for memory {stalled:.0f} % of the last 10 s"
    if memory.available_bytes < limit.stop_below_bytes:
        return "stop", left
    if is_short and stalled >= STOP_STALLED_PERCENT:
        return "stop", waiting
    if memory.available_bytes < limit.pause_below_bytes:
        return "pause", left
    if is_short and stalled >= PAUSE_STALLED_PERCENT:
        return "pause", waiting
    if is_paused and memory.available_bytes < limit.resume_from_bytes:
        return "pause", left
    return "serve", left


class Governor:
    """Samples memory until `close`; `act` is called from its thread and must not wait.

    "pause" is repeated at every sample, so that a server that becomes ready meanwhile is paused
    too; "serve" follows once. After "stop" the thread ends, because there is nothing left to watch;
    without `ends_at_stop` it goes on, and "stop" is repeated like "pause".
    """

    def __init__(
        self,
        source: MemorySource,
        limit: Limits,
        act: Callable[[Action, str], None],
        ends_at_stop: bool = True,
    ) -> None:
        self._source, self._limit, self._act = source, limit, act
        self._ends_at_stop = ends_at_stop
        self._last: Memory | None = None
        self._action: Action = "serve"
        self._over = threading.Event()
        self._kills, self._killed_at = source.kernel_kills(), float("-inf")

    def run(self) -> None:
        """The loop, for a separate thread. It closes the source."""
        with contextlib.suppress(OSError):  # where it is permitted: ahead of the engine's threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        calm_since = 0.0
        try:
            while not (self._over.is_set() or (self._ends_at_stop and self._action == "stop")):
                calm_since = self._look(calm_since)
                self._over.wait(INTERVAL_S)
        finally:
            self._source.close()

    def _look(self, calm_since: float) -> float:
        """Take one sample; returns the time since when memory is sufficient. After a failed reading
        the next sample counts: the watchdog continues.
        """
        try:
            self._last = memory = self._source.read()
            self.kernel_has_killed()
        except (OSError, KeyError):
            return calm_since
        action, why = decide(memory, self._limit, self._action != "serve")
        now = time.monotonic()
        if action != "serve" or self._action == "serve":
            calm_since = now
        if action != "serve" or (self._action != "serve" and now - calm_since >= RESUME_AFTER_S):
            self._action = action
            self._act(action, why)
        return calm_since

    def close(self) -> None:
        """End the loop; one more sample is possible."""
        self._over.set()

    @property
    def available_bytes(self) -> int:
        """Available memory at the last sample."""
        return self._last.available_bytes if self._last else 0

    def kernel_has_killed(self) -> bool:
        """Whether the kernel's OOM killer ended a process within the last KILL_IS_NEWS_S."""
        count, now = self._source.kernel_kills(), time.monotonic()
        if count > self._kills:
            self._kills, self._killed_at = count, now
        return now - self._killed_at < KILL_IS_NEWS_S

    def to_json(self) -> dict[str, Any]:
        """The last sample and the limits, for /status."""
        last = self._last
        return {"action": self._action, **(asdict(last) if last else {}), **asdict(self._limit)}

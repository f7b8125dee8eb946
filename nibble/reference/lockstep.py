"""Runs several passes of a module layer by layer, so that each layer's weights are read once.

Each pass is an ordinary call of the module's forward in a thread, and one thread runs at a time.
So passes of different lengths need no padding, and the module handles masks, positions and kinds
of layers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any


class Lockstep:
    """`run` starts all passes. A pass calls `arrive` before each unit (a part with weights).

    load, free: called with the unit's name before the first pass enters and after the last leaves.
    """

    def __init__(self, load: Callable[[str], None], free: Callable[[str], None]) -> None:
        self._load, self._free = load, free
        self._turn = threading.Condition()
        self._waiting: dict[int, str] = {}  # number of a pass -> the unit that it waits for
        self._running: int | None = None
        self._results: dict[int, Any] = {}
        self._own = threading.local()
        self._stopped = False

    def run(self, passes: Sequence[Callable[[], Any]]) -> list[Any]:
        """The results of the passes in their order. Raises the first exception of a pass."""
        threads = [
            threading.Thread(target=self._thread, args=(number, function), daemon=True)
            for number, function in enumerate(passes)
        ]
        self._waiting = dict.fromkeys(range(len(passes)), "")
        for thread in threads:
            thread.start()
        try:
            self._drive(len(passes))
        finally:
            with self._turn:
                self._stopped = True
                self._turn.notify_all()
            for thread in threads:
                thread.join()
        for number in range(len(passes)):
            if isinstance(self._results[number], BaseException):
                raise self._results[number]
        return [self._results[number] for number in range(len(passes))]

    def arrive(self, unit: str) -> None:
        """Wait until `unit` is loaded and it is this pass's turn. Called by a pass."""
        number = self._own.number
        with self._turn:
            # Not for a thread that starts while another pass runs.
            if self._running == number:
                self._running = None
            self._waiting[number] = unit
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._running == number or self._stopped)
            if self._stopped:
                raise InterruptedError("another pass failed")

    def _thread(self, number: int, function: Callable[[], Any]) -> None:
        self._own.number = number
        try:
            self.arrive("")
            result = function()
        except BaseException as error:
            result = error
        with self._turn:
            self._results[number], self._running = result, None
            self._waiting.pop(number, None)
            self._turn.notify_all()

    def _drive(self, count: int) -> None:
        """For each unit: load it, run every pass that waits for it, free it."""
        while len(self._results) < count:
            unit = next(iter(self._waiting.values()))
            if unit:
                self._load(unit)
            numbers = [number for number, awaited in self._waiting.items() if awaited == unit]
            for number in numbers:
                self._resume(number)
            if unit:
                self._free(unit)

    def _resume(self, number: int) -> None:
        """Run one pass until it waits again or ends."""
        with self._turn:
            self._waiting.pop(number)
            self._running = number
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._running is None)
        if isinstance(error := self._results.get(number), BaseException):
            raise error

"""Runs several passes of a module in step, so that each layer's weights are read once.

Each pass is the module's own forward in a thread; one of them runs at a time. Passes of different
lengths need no padding, and the module decides everything about masks, positions and kinds of
layers itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any


class Lockstep:
    """`run` starts all passes; `arrive`, called in a pass, waits until the unit that it names is
    loaded and it is its turn.
    """

    def __init__(self, load: Callable[[str], None], free: Callable[[str], None]) -> None:
        self._load, self._free = load, free
        self._turn = threading.Condition()
        self._waiting: dict[int, str] = {}  # pass -> the unit it is about to enter
        self._running: int | None = None
        self._results: dict[int, Any] = {}
        self._own = threading.local()
        self._stopped = False

    def run(self, passes: Sequence[Callable[[], Any]]) -> list[Any]:
        """The results of the passes in their order. Raises what the first of them raised."""
        threads = [
            threading.Thread(target=self._thread, args=(number, one), daemon=True)
            for number, one in enumerate(passes)
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
        """Called in a pass that is about to enter `unit`."""
        number = self._own.number
        with self._turn:
            if self._running == number:  # a thread that begins late does so while another pass runs
                self._running = None
            self._waiting[number] = unit
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._running == number or self._stopped)
            if self._stopped:
                raise InterruptedError("another pass failed")

    def _thread(self, number: int, one: Callable[[], Any]) -> None:
        self._own.number = number
        try:
            self.arrive("")
            found = one()
        except BaseException as error:
            found = error
        with self._turn:
            self._results[number], self._running = found, None
            self._waiting.pop(number, None)
            self._turn.notify_all()

    def _drive(self, count: int) -> None:
        """Unit by unit: load it, let every pass that waits for it go through, free it."""
        while len(self._results) < count:
            unit = next(iter(self._waiting.values()))
            if unit:
                self._load(unit)
            for number in [number for number, wanted in self._waiting.items() if wanted == unit]:
                self._go(number)
            if unit:
                self._free(unit)

    def _go(self, number: int) -> None:
        """One pass until it waits again or is over."""
        with self._turn:
            self._waiting.pop(number)
            self._running = number
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._running is None)
        if isinstance(error := self._results.get(number), BaseException):
            raise error

"""What the user sees while the engine starts: a live line on a terminal, else one line a phase.

nibble writes to stderr. vLLM's stdout and stderr pass through unchanged.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from nibble.engine.log import PhaseUpdate
from nibble.printable import printable

_STEP = 0.25  # without a terminal, progress within a phase is printed at each quarter
_REFRESH_PER_SECOND = 4


class Display:
    """Shows phases and passes the engine's output on. Thread-safe.

    `silence` gives the seconds since the engine's last progress. `live` is whether to draw on
    the terminal; None asks stderr.
    """

    def __init__(self, silence: Callable[[], float], live: bool | None = None) -> None:
        self._lock = threading.RLock()
        self._silence = silence
        self._live: Any = None
        self._is_terminal = os.isatty(2) if live is None else live
        self._phase = ""
        self._progress: float | None = None
        self._detail = ""
        self._told: float = 0.0
        self._phase_since = self._since = time.monotonic()
        self._at_line_start = True

    def start(self) -> None:
        """Begin the live display if stderr is a terminal."""
        if not self._is_terminal or os.environ.get("TERM") == "dumb":
            return
        from rich.console import Console
        from rich.live import Live

        console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._live = Live(
            get_renderable=self._render,
            console=console,
            refresh_per_second=_REFRESH_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def stop(self) -> None:
        """End the live display; later output is plain."""
        with self._lock:
            if self._live is not None:
                self._live.stop()
                self._live = None

    def show(self, update: PhaseUpdate) -> None:
        """Show a phase of the start or its progress."""
        with self._lock:
            is_new = update.phase != self._phase
            if is_new:
                self._phase, self._phase_since, self._told = update.phase, time.monotonic(), 0.0
            self._progress = (
                update.progress if update.progress is not None or is_new else self._progress
            )
            self._detail = update.detail or ("" if is_new else self._detail)
            if self._live is None and (is_new or self._is_next_step()):
                self._told = self._progress or 0.0
                self.say(describe(update.phase, self._progress, update.detail))

    def _is_next_step(self) -> bool:
        return self._progress is not None and self._progress - self._told >= _STEP

    def say(self, text: str) -> None:
        """Print a message of nibble."""
        text = printable(text)
        with self._lock:
            if self._live is not None:
                self._live.console.print(f"[nibble] {text}", markup=False)
                return
            start = "" if self._at_line_start else "\n"
            self._at_line_start = True
            _write_all(2, f"{start}[nibble] {text}\n".encode())

    def pass_through(self, descriptor: int, data: bytes) -> None:
        """Write the engine's output to stdout (1) or stderr (2), at once and unchanged."""
        with self._lock:
            if self._live is not None and os.isatty(descriptor):
                # Above the live line; whole lines only look right there, and vLLM writes whole
                # lines.
                text = data.decode(errors="replace").replace("\r\n", "\n").strip("\n")
                if text:
                    self._live.console.out(text, highlight=False)
                return
            _write_all(descriptor, data)
            if data:
                self._at_line_start = data.endswith(b"\n")

    def _render(self) -> Any:
        from rich.text import Text

        now = time.monotonic()
        line = describe(self._phase or "start", self._progress, self._detail)
        times = f"{now - self._phase_since:.0f} s in this phase, {now - self._since:.0f} s in all"
        return Text(
            f"[nibble] {line}  ({times}; last progress {self._silence():.0f} s ago)",
            style="bold",
            overflow="ellipsis",
            no_wrap=True,
        )


def describe(phase: str, progress: float | None, detail: str) -> str:
    """`load: 62 %, 3.1 GiB`."""
    parts = [f"{progress * 100:.0f} %"] if progress is not None else []
    parts += [detail] if detail else []
    return f"{phase}: {', '.join(parts)}" if parts else phase


class StallWatch:
    """Reports silence of the engine once a period; never acts on it. Pure: the caller has the
    clock.

    `period_s` is both the silence before a report and the interval between reports.
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._told = 0

    def due(self, silence_s: float) -> bool:
        """Whether a report is due after `silence_s` seconds without a sign of life."""
        periods = int(silence_s // self._period_s)
        if periods < self._told:  # there was a sign of life
            self._told = periods
        if periods <= self._told:
            return False
        self._told = periods
        return True


def stderr_is_terminal() -> bool:
    """Whether stderr is a terminal: only then nibble shows a key."""
    return sys.stderr.isatty()


def _write_all(descriptor: int, data: bytes) -> None:
    """Write everything; a closed pipe does not stop the server."""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError:
        pass

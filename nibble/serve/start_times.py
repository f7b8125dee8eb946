"""The phases of a start: their durations now and in the last start of the same plan, and the time
left.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nibble.engine.log import Phase, PhaseUpdate


def durations(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of each phase, from entries of `phase` and `at_s`; the last entry has no end and is
    omitted.
    """
    pairs = itertools.pairwise(history)
    return {one["phase"]: round(following["at_s"] - one["at_s"], 2) for one, following in pairs}


def left_s(last: Mapping[str, float], phase: str, in_phase_s: float) -> float | None:
    """Seconds to ready if this start takes as long as the last one; None without a record of the
    phase.

    A phase that exceeds its last duration counts as nearly over.
    """
    if phase not in last:
        return None
    names = list(last)
    later = sum(last[name] for name in names[names.index(phase) + 1 :])
    return round(max(0.0, last[phase] - in_phase_s) + later, 1)


class StartTimes:
    """The record of one plan. A file that cannot be read or written counts as absent."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.last: dict[str, float] = {}
        if path is not None:
            with contextlib.suppress(
                OSError, ValueError, TypeError, AttributeError, RecursionError
            ):
                self.last = {
                    str(name): float(seconds)
                    for name, seconds in json.loads(path.read_text()).items()
                }

    def keep(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Save this start as the last one that became ready."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                scratch = self._path.with_suffix(".new")
                scratch.write_text(json.dumps(durations(history)))
                scratch.replace(self._path)


class Timeline:
    """The current phase, its begin and the phases before; it begins when created. `times` has the
    last start.
    """

    def __init__(self, times: StartTimes) -> None:
        self._times = times
        self._started = self._entered = time.monotonic()
        self._since = datetime.now(UTC)
        self._update = PhaseUpdate("start")
        self._history: list[dict[str, Any]] = [{"phase": "start", "at_s": 0.0}]

    @property
    def phase(self) -> Phase:
        return self._update.phase

    @property
    def seconds(self) -> float:
        """Seconds since the start began."""
        return time.monotonic() - self._started

    def go_to(self, update: PhaseUpdate) -> None:
        """Enter another phase, or update the progress of the current one."""
        if update.phase != self._update.phase:
            self._entered, self._since = time.monotonic(), datetime.now(UTC)
            self._history.append(
                {"phase": update.phase, "at_s": round(self._entered - self._started, 2)}
            )
        self._update = update

    def keep(self) -> None:
        """Save this start as the estimate for the next one."""
        self._times.keep(self._history)

    def to_json(self) -> dict[str, Any]:
        """For /status."""
        in_phase_s, last = time.monotonic() - self._entered, self._times.last
        return {
            "phase": self._update.phase,
            "progress": self._update.progress,
            "detail": self._update.detail,
            "since": self._since.isoformat(timespec="seconds"),
            "seconds_in_phase": round(in_phase_s, 1),
            "seconds_since_start": round(self.seconds, 1),
            "history": list(self._history),
            "last_start_s": last,
            "eta_s": left_s(last, self._update.phase, in_phase_s),
        }

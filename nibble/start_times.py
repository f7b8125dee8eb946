"""How long the last start of the same plan took, phase by phase, and so how long this one may take."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def durations(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of each phase, from entries of `phase` and `at_s`; the last one has no end and is left out."""
    pairs = itertools.pairwise(history)
    return {one["phase"]: round(following["at_s"] - one["at_s"], 2) for one, following in pairs}


def left_s(last: Mapping[str, float], phase: str, in_phase_s: float) -> float | None:
    """Seconds to ready if this start goes as the last one; None where nothing is known or the last one had no such phase.

    A phase that takes longer than it did counts as nearly over.
    """
    if phase not in last:
        return None
    names = list(last)
    later = sum(last[name] for name in names[names.index(phase) + 1 :])
    return round(max(0.0, last[phase] - in_phase_s) + later, 1)


class StartTimes:
    """The record of one plan. A file that cannot be read or written is no record."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.last: dict[str, float] = {}
        if path is not None:
            with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
                self.last = {
                    str(name): float(seconds) for name, seconds in json.loads(path.read_text()).items()
                }

    def keep(self, history: Sequence[Mapping[str, Any]]) -> None:
        """This start was the last one to get ready."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                scratch = self._path.with_suffix(".new")
                scratch.write_text(json.dumps(durations(history)))
                scratch.replace(self._path)

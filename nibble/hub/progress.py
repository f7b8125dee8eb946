"""Progress of the stages before vLLM, such as a download, and the same as lines of text."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from nibble.machine.disk import gib

PROGRESS_SECONDS = 0.5  # between two reports
Stage = Literal["download", "verify", "convert", "measure", "quantize", "reference", "trials"]


@dataclass(frozen=True)
class Progress:
    """Progress of a stage before vLLM, or of a conversion, in bytes."""

    stage: Stage
    done_bytes: int
    total_bytes: int


OnProgress = Callable[[Progress], None]


def as_lines(say: Callable[[str], None], every_seconds: float = 10) -> OnProgress:
    """Progress as text: start and end of a stage, and one line each `every_seconds` between."""
    last: dict[str, float] = {}
    said = ""

    def report(step: Progress) -> None:
        nonlocal said
        now, ends = time.monotonic(), step.done_bytes >= step.total_bytes
        line = f"{step.stage}: {gib(step.done_bytes)} of {gib(step.total_bytes)}"
        is_due = step.stage not in last or now - last[step.stage] >= every_seconds
        if (ends or is_due) and line != said:
            last[step.stage], said = now, line
            say(line)

    return report

"""The outcome of one case of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """`reason` says what was wrong; for a case that was not run, why."""

    name: str
    passed: bool
    reason: str = ""
    is_skipped: bool = False

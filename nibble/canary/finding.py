"""The result of one of the canary's mechanisms, and the exceptions that end a mechanism early."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Verdict = Literal["passed", "failed", "not compared"]


class NotCompared(Exception):
    """A mechanism cannot decide: the time is over, or the server lacks a feature or data."""


class Broken(Exception):
    """The server answered an ordinary request with a server error (5xx)."""


@dataclass(frozen=True)
class Finding:
    """One mechanism's verdict.

    detail: one line, what was compared or what is wrong; warning: a problem that does not fail the
    check; seconds: how long the mechanism took.
    """

    mechanism: str
    verdict: Verdict
    detail: str
    warning: str = ""
    seconds: float = 0.0

    def taking(self, seconds: float) -> Finding:
        """The same finding with its duration."""
        return replace(self, seconds=round(seconds, 2))

    def line(self) -> str:
        """For the log."""
        warning = f"; {self.warning}" if self.warning else ""
        return f"{self.mechanism}: {self.verdict}: {self.detail}{warning}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

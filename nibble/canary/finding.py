"""What a mechanism found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Verdict = Literal["passed", "failed", "not compared"]


class NotCompared(Exception):
    """Why a mechanism says nothing: no time left, or the server lacks what it needs."""


class Broken(Exception):
    """The server failed at a plain request."""


@dataclass(frozen=True)
class Finding:
    """One mechanism's verdict and, in one line, what it looked at or what is wrong. `warning`:
    passed, and worth telling.
    """

    mechanism: str
    verdict: Verdict
    detail: str
    warning: str = ""
    seconds: float = 0.0

    def taking(self, seconds: float) -> Finding:
        return replace(self, seconds=round(seconds, 2))

    def line(self) -> str:
        return f"{self.mechanism}: {self.verdict}: {self.detail}" + (
            f"; {self.warning}" if self.warning else ""
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

"""What `nibble doctor` reports: checks in their order, and the exit code they make."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from nibble.engine.patching.status import Line
from nibble.engine.patching.tree import Tree
from nibble.errors import ExitCode


@dataclass(frozen=True)
class Check:
    """One check: what it found, and the fix unless the status is ok."""

    name: str
    status: Literal["ok", "warning", "fail"]
    what: str
    fix: str = ""


@dataclass(frozen=True)
class Report:
    """All checks in their order, and the table of the last `nibble patches check` of the installed
    vLLM.
    """

    checks: tuple[Check, ...]
    tree: Tree | None = None
    patches: tuple[Line, ...] = ()

    @property
    def exit_code(self) -> ExitCode:
        """3 without usable hardware, 6 where something else fails, else 0: warnings do not
        count.
        """
        failed = {check.name for check in self.checks if check.status == "fail"}
        if failed & {"target", "driver"}:
            return ExitCode.NO_HARDWARE
        return ExitCode.VERIFY if failed else ExitCode.OK

    def to_json(self) -> dict[str, Any]:
        """Plain data for --json; holds no secret."""
        return {
            "exit_code": int(self.exit_code),
            "checks": [asdict(check) for check in self.checks],
            "patches": [asdict(line) for line in self.patches],
        }

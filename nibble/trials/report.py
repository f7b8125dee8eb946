"""The report of a self-test: what ran where, with which result. Pure. It has no secret, no path and
no name of a machine or user.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nibble.errors import ExitCode, NibbleError
from nibble.trials.findings import Finding
from nibble.trials.trial import Outcome

FORMAT = 1


@dataclass(frozen=True)
class Place:
    """The machine and the build that results hold for."""

    target: str
    device: str  # the GPU's name, or the processor's
    gpus: int
    driver: str
    cuda: str
    compiled: str  # installed.compiled_id
    build: str
    parts: Mapping[str, str] = field(default_factory=dict)  # installed.build_parts

    @property
    def key(self) -> str:
        """16 hex digits of GPU, driver and compiled code: what a result depends on."""
        text = json.dumps([self.target, self.device, self.driver, self.compiled])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Report:
    """Everything that a self-test found. `wrong`: kernels of a plan that are at fault."""

    place: Place
    date: str
    seconds: float
    outcomes: tuple[Outcome, ...]
    findings: tuple[Finding, ...] = ()
    wrong: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    memory: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> ExitCode:
        if self.wrong:
            return ExitCode.CANARY
        if any(finding.blocks for finding in self.findings):
            return ExitCode.NO_HARDWARE
        return ExitCode.OK

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "place": asdict(self.place),
            "date": self.date,
            "seconds": self.seconds,
            "exit_code": int(self.exit_code),
            "wrong": list(self.wrong),
            "findings": [asdict(finding) for finding in self.findings],
            "gpus": list(self.states),
            "memory": dict(self.memory),
            "trials": [outcome.to_json() for outcome in self.outcomes],
        }


def read_report(path: Path) -> tuple[Report, str]:
    """A report from a file, and the file's sha256. Raises USAGE for another file."""
    try:
        content = path.read_bytes()
        return parse_report(json.loads(content)), hashlib.sha256(content).hexdigest()
    except OSError as error:
        why = error.strerror or str(error)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
    raise NibbleError(
        ExitCode.USAGE,
        what=f"{path} is not a report of `nibble selftest` ({why})",
        action="make one with `nibble selftest --out FILE`",
    )


def parse_report(data: Mapping[str, Any]) -> Report:
    """Raises KeyError, TypeError, ValueError or AttributeError for other data."""
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']!r}, expected {FORMAT}")
    return Report(
        place=Place(**data["place"]),
        date=str(data["date"]),
        seconds=float(data["seconds"]),
        outcomes=tuple(map(Outcome.from_json, data["trials"])),
        findings=tuple(Finding(**finding) for finding in data["findings"]),
        wrong=tuple(map(str, data["wrong"])),
        states=tuple(map(str, data["gpus"])),
        memory=dict(data["memory"]),
    )


# Bits that a weight's element takes, with its scales: trials whose weight is not NVFP4.
BITS: Mapping[str, float] = {"fp8": 8, "sparse": 3.5}


def gb_per_s(outcome: Outcome) -> Sequence[tuple[str, float]]:
    """Shape -> GB/s of codes and scales read with one row, for the table."""
    found: list[tuple[str, float]] = []
    nbytes = BITS.get(outcome.name, 4.5) / 8
    for shape, times in outcome.times.items():
        rows, columns = map(int, shape.split("x"))
        if one := times.get("1"):
            found.append((shape, rows * columns * nbytes / one / 1e3))
    return found

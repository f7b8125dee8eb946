"""Reads the progress of vLLM's processes from the pulses that nibble's plugin writes
(plugin/pulse.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nibble.engine.contract.pulse import PulseKind, PulseRecord, pulse_file


@dataclass(frozen=True, slots=True)
class Pulse:
    """The pulse of one process; see PulseRecord."""

    kind: PulseKind
    pid: int
    doing: int
    is_paused: bool
    turns: int
    requests: int
    tokens: int


def read_pulses(folder: Path) -> tuple[Pulse, ...]:
    """The pulses of all processes that wrote one; unreadable ones are omitted."""
    found = []
    kinds: tuple[PulseKind, ...] = ("api", "engine")
    for kind in kinds:
        for path in sorted(folder.glob(pulse_file(kind, "*"))):
            if (pulse := _read(kind, path)) is not None:
                found.append(pulse)
    return tuple(found)


def _read(kind: PulseKind, path: Path) -> Pulse | None:
    try:
        record = PulseRecord.from_bytes(path.read_bytes())
    except OSError:
        return None
    return Pulse(kind, *record) if record is not None else None

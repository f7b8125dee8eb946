"""Reads how far vLLM's processes are from what nibble's plugin writes in them."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FOLDER = "NIBBLE_PULSE"
PROBE = "/health?nibble"  # the plugin keeps it out of the access log
MAGIC = b"nblpuls1"
LAYOUT = struct.Struct("=8sIBBxxQQQ")
IDLE, STEP, CALL = 0, 1, 2

Kind = Literal["api", "engine"]


@dataclass(frozen=True, slots=True)
class Pulse:
    """One process: `turns` grows with each step or answer, `doing` is IDLE, STEP (a step of the
    model) or CALL (a utility).

    `requests` are those it holds, `tokens` those of the batch that it waits for; `is_paused` while
    it sleeps.
    """

    kind: Kind
    pid: int
    doing: int
    is_paused: bool
    turns: int
    requests: int
    tokens: int


def read_pulses(folder: Path) -> tuple[Pulse, ...]:
    """Those of all processes that wrote one; what cannot be read is left out."""
    found = []
    kinds: tuple[Kind, ...] = ("api", "engine")
    for kind in kinds:
        for path in sorted(folder.glob(f"{kind}-*")):
            if (pulse := _read(kind, path)) is not None:
                found.append(pulse)
    return tuple(found)


def _read(kind: Kind, path: Path) -> Pulse | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != LAYOUT.size:
        return None
    magic, pid, doing, paused, turns, requests, tokens = LAYOUT.unpack(data)
    return (
        Pulse(kind, pid, doing, bool(paused), turns, requests, tokens) if magic == MAGIC else None
    )

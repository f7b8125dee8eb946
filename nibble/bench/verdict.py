"""Whether a soak was steady: memory, restarts, errors, drift. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

MIB = 1 << 20
GROWTH_BYTES, GROWTH_SHARE = 256 * MIB, 0.05  # of memory; below both it is a cache that fills
MAX_DRIFT = 0.1  # nats of a token; the demo on a CPU gives 0
FEWEST_SAMPLES = 8  # of memory, for a judgement


@dataclass(frozen=True)
class Sample:
    """The server at one time. `memory_bytes`: resident in all its processes, None if unknown;
    `engine_pid`: None where nibble's control port does not say.
    """

    at_s: float
    memory_bytes: int | None
    engine_pid: int | None
    answers: bool


@dataclass(frozen=True)
class Soak:
    """All that a soak saw. `left_over`: requests that the engine still held after all clients had
    gone, None if unknown; `drifts` in nats, in order; `seeded_same`: share of seeded answers that
    are the most frequent one.
    """

    seconds: float
    done: Mapping[str, int]
    failed: Mapping[str, int]
    refused: Mapping[str, int]
    reasons: Mapping[str, int]
    left_out: Mapping[str, str]
    seeded_same: float | None
    samples: Sequence[Sample]
    drifts: Sequence[float]
    left_over: int | None
    ended: str = ""

    @property
    def restarts(self) -> int:
        """How often another engine process served than before."""
        pids = [one.engine_pid for one in self.samples if one.engine_pid is not None]
        return sum(new != old for old, new in pairwise(pids))

    @property
    def growth_bytes(self) -> int | None:
        """Memory of the last quarter minus that of the second; None with few samples or after a
        restart.
        """
        sizes = [one.memory_bytes for one in self.samples if one.memory_bytes is not None]
        if len(sizes) < FEWEST_SAMPLES or self.restarts:
            return None
        quarter = len(sizes) // 4
        early, late = sizes[quarter : 2 * quarter], sizes[-quarter:]
        return round(statistics.median(late) - statistics.median(early))

    @property
    def memory_bytes(self) -> int | None:
        """The largest sample."""
        return max((one.memory_bytes for one in self.samples if one.memory_bytes), default=None)

    @property
    def worst_drift(self) -> float:
        return max(self.drifts, default=0.0)

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the verdict."""
        return {
            **asdict(self),
            "restarts": self.restarts,
            "memory_bytes": self.memory_bytes,
            "growth_bytes": self.growth_bytes,
            "worst_drift": self.worst_drift,
            "problems": problems(self),
            "verdict": "failed" if problems(self) else "steady",
        }


def problems(soak: Soak) -> list[str]:
    """What was not steady, a line each; none is a verdict of `steady`."""
    found = [f"it ended early: {soak.ended}"] if soak.ended else []
    if failed := sum(soak.failed.values()):
        why = "; ".join(f"{reason} ({count})" for reason, count in list(soak.reasons.items())[:3])
        found.append(f"{failed} requests failed: {why}")
    refused, done = sum(soak.refused.values()), sum(soak.done.values())
    if refused > done:
        found.append(f"{refused} requests were refused (429 or 503), more than the {done} answered")
    if not done:
        found.append("no request was answered")
    if soak.restarts:
        found.append(f"the engine was restarted ({soak.restarts})")
    growth, size = soak.growth_bytes, soak.memory_bytes
    if growth is not None and size and growth > max(GROWTH_BYTES, GROWTH_SHARE * size):
        found.append(f"memory grew by {growth / MIB:.0f} MiB to {size / MIB:.0f} MiB")
    if soak.worst_drift > MAX_DRIFT:
        found.append(
            f"log-probs of fixed texts moved by {soak.worst_drift:.3f} nats a token, more than"
            f" {MAX_DRIFT}"
        )
    if soak.left_over:
        found.append(f"the engine still held {soak.left_over} requests after all clients had gone")
    return found

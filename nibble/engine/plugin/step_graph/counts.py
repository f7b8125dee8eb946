"""Counts steps by path and reason, for /metrics.

The engine core writes its counts into a file of NIBBLE_PULSE; the API server reads the files when
Prometheus asks. Without nibble's supervisor there is no folder, and nothing is reported.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nibble.engine.contract import PULSE_FOLDER
from nibble.engine.contract.pulse import STEP_REASONS, StepCounts, steps_file

METRIC = "nibble_engine_steps"
HELP = "Steps of the model, by path (graph, inputs, vllm) and reason; see docs/step_graph.md."


class Counter:
    """The counts of one engine process."""

    def __init__(self, folder: Path | None) -> None:
        self._counts = dict.fromkeys(STEP_REASONS, 0)
        self._file = _mapped(folder / steps_file(os.getpid())) if folder else None

    def add(self, reason: str) -> None:
        self._counts[reason] += 1
        if self._file is not None:
            StepCounts.write(self._file, self._counts)

    def to_json(self) -> dict[str, int]:
        """The counts that are not 0."""
        return {reason: count for reason, count in self._counts.items() if count}


def pulse_folder() -> Path | None:
    folder = Path(os.environ.get(PULSE_FOLDER, "/nonexistent"))
    return folder if folder.is_dir() else None


def read_counts(folder: Path) -> dict[str, int]:
    """The sums over all engine processes; unreadable files are omitted."""
    sums: dict[str, int] = {}
    for path in sorted(folder.glob(steps_file("*"))):
        try:
            data = path.read_bytes()
        except OSError:
            continue
        for reason, count in StepCounts.read(data).items():
            sums[reason] = sums.get(reason, 0) + count
    return sums


def report_metric() -> None:
    """Add the counter to this process's /metrics, if nibble's supervisor runs it."""
    folder = pulse_folder()
    if folder is None:
        return
    from prometheus_client import REGISTRY
    from prometheus_client.core import CounterMetricFamily

    class Steps:
        def describe(self) -> list[Any]:
            return [CounterMetricFamily(METRIC, HELP, labels=("path", "reason"))]

        def collect(self) -> Iterator[Any]:
            family = CounterMetricFamily(METRIC, HELP, labels=("path", "reason"))
            for reason, count in read_counts(folder).items():
                family.add_metric((STEP_REASONS[reason], reason), count)
            yield family

    REGISTRY.register(Steps())


def _mapped(path: Path) -> mmap.mmap:
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        os.ftruncate(descriptor, StepCounts.size)
        return mmap.mmap(descriptor, StepCounts.size)
    finally:
        os.close(descriptor)

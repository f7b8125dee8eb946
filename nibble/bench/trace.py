"""A profile of some steps of a server: by kernel from torch's trace files, and one for Perfetto."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nibble.errors import ExitCode, NibbleError

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_CPU = ("cpu_op",)
STEP = ("execute_", "execute_context", "ProfilerStep")
_MALFORMED = (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Kernel:
    """All runs of one kernel, or of one operator where no GPU takes part."""

    name: str
    count: int
    microseconds: float
    share: float


@dataclass(frozen=True)
class Profile:
    """`steps`: executions of the model that the trace holds; `on_gpu`: kernels, else operators,
    whose own time counts without that of the operators inside.
    """

    steps: int
    on_gpu: bool
    microseconds: float
    kernels: tuple[Kernel, ...]

    def to_json(self) -> dict[str, Any]:
        kernels = [vars(one) for one in self.kernels]
        return {**vars(self), "kernels": kernels}


def read_trace(path: Path) -> dict[str, Any]:
    """A trace of torch. Raises INTERNAL where it is not one."""
    try:
        open_it = gzip.open if path.suffix == ".gz" else open
        with open_it(path, "rt") as file:
            found = json.load(file)
        if not isinstance(found["traceEvents"], list):
            raise ValueError("no list of events")
        return found
    except _MALFORMED as error:
        raise NibbleError(
            ExitCode.INTERNAL,
            what=f"{path} is not a trace of torch's profiler ({type(error).__name__}: {error})",
            action="install the vLLM that this nibble pins",
        ) from None


def profile(trace: Mapping[str, Any]) -> Profile:
    """Time by kernel, most first. Pure."""
    events = [one for one in trace["traceEvents"] if one.get("ph") == "X"]
    on_gpu = any(one.get("cat") in ON_GPU for one in events)
    taken = _of_gpu(events) if on_gpu else _of_cpu(events)
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for name, microseconds in taken:
        times[name] += microseconds
        counts[name] += 1
    total = sum(times.values())
    order = sorted(times, key=lambda name: (-times[name], name))
    kernels = (
        Kernel(name, counts[name], round(times[name], 3), times[name] / total if total else 0.0)
        for name in order
    )
    steps = sum(
        one.get("cat") == "user_annotation" and str(one.get("name")).startswith(STEP)
        for one in events
    )
    return Profile(steps, on_gpu, round(total, 3), tuple(kernels))


def _of_gpu(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    for one in events:
        if one.get("cat") in ON_GPU:
            yield str(one["name"]), float(one["dur"])


def _of_cpu(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Each operator's time without that of the operators it called, by thread."""
    threads: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for one in events:
        if one.get("cat") in ON_CPU:
            threads[one.get("pid"), one.get("tid")].append(one)
    for thread in threads.values():
        open_ops: list[list[Any]] = []  # name, end, own time
        for one in sorted(thread, key=lambda event: (float(event["ts"]), -float(event["dur"]))):
            begin, length = float(one["ts"]), float(one["dur"])
            while open_ops and begin >= open_ops[-1][1]:
                name, _, own = open_ops.pop()
                yield name, max(0.0, own)
            if open_ops:
                open_ops[-1][2] -= length
            open_ops.append([str(one["name"]), begin + length, length])
        for name, _, own in open_ops:
            yield name, max(0.0, own)


def merge(traces: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One trace of several processes, each with its own name in Perfetto. Pure.

    Ids of processes and flows repeat in containers and ranks, so that each trace gets its own.
    """
    events: list[dict[str, Any]] = []
    numbers: dict[tuple[str, str], int] = {}
    for place, (name, trace) in enumerate(sorted(traces.items())):
        for one in trace["traceEvents"]:
            moved = dict(one)
            if "pid" in moved:
                key = (name, str(moved["pid"]))
                moved["pid"] = numbers.setdefault(key, len(numbers) + 1)
            if "id" in moved:
                moved["id"] = f"{place}.{moved['id']}"
            if moved.get("name") == "process_name":
                moved["args"] = {"name": f"{name}: {moved['args']['name']}"}
            events.append(moved)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_merged(trace: Mapping[str, Any], path: Path) -> None:
    """Compressed; Perfetto reads it as it is."""
    with gzip.open(path, "wt", compresslevel=6) as file:
        json.dump(trace, file)


def table(found: Profile, most: int) -> list[tuple[str, ...]]:
    """Rows of (kernel, runs, ms, share). Pure."""
    rows = [
        (one.name[:90], str(one.count), f"{one.microseconds / 1000:.3f}", f"{one.share:.1%}")
        for one in found.kernels[:most]
    ]
    rest = found.kernels[most:]
    if rest:
        spent = sum(one.microseconds for one in rest)
        runs, share = sum(one.count for one in rest), sum(one.share for one in rest)
        rows.append((f"{len(rest)} more", str(runs), f"{spent / 1000:.3f}", f"{share:.1%}"))
    return rows

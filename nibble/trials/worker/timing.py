"""Times of products: medians of CUDA graphs, or of calls on the CPU."""

from __future__ import annotations

import fcntl
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

Call = Callable[[], object]
MOST_REPEATS = 15


@contextmanager
def alone(lock: str) -> Iterator[None]:
    """Hold the file `lock`: time is measured by one process, and while no other one multiplies. A
    process that ends gives it back.
    """
    with _held(lock, fcntl.LOCK_EX):
        yield


@contextmanager
def beside_others(lock: str) -> Iterator[None]:
    """Hold the file `lock` with other processes: none measures time."""
    with _held(lock, fcntl.LOCK_SH):
        yield


@contextmanager
def _held(lock: str, how: int) -> Iterator[None]:
    if not lock:
        yield
        return
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


def copies_beyond_the_cache(nbytes: int, device: str) -> int:
    """Copies of a weight that do not all fit in the second cache: a decode step finds none there.

    On the CPU two, because the trials of a CPU do not choose.
    """
    if device == "cpu":
        return 2
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, min(64, -(-2 * cache // nbytes)))


def seconds_of(calls: Sequence[Call], device: str, budget_s: float) -> float:
    """Seconds of one call: the median of passes over all `calls`, within about `budget_s`."""
    for call in calls[:2]:
        call()
    if device == "cpu":
        return _by_clock(calls, budget_s)
    torch.cuda.synchronize()
    return _by_events(calls, budget_s)


def _by_clock(calls: Sequence[Call], budget_s: float) -> float:
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < 3 or (time.perf_counter() < end and len(times) < MOST_REPEATS):
        began = time.perf_counter()
        for call in calls:
            call()
        times.append((time.perf_counter() - began) / len(calls))
    return statistics.median(times)


def _by_events(calls: Sequence[Call], budget_s: float) -> float:
    """With one CUDA graph of all calls; calls that cannot be captured are timed without."""
    replay = _captured(calls)
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < 3 or (time.perf_counter() < end and len(times) < MOST_REPEATS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3 / len(calls))
    return statistics.median(times[1:])


def _captured(calls: Sequence[Call]) -> Callable[[], object]:
    def plain() -> None:
        for call in calls:
            call()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        plain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            plain()
    except RuntimeError:  # it synchronizes, as emulations do
        torch.cuda.synchronize()
        return plain
    return graph.replay

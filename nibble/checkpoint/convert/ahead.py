"""Computes several tensors at a time, in their order and within a limit of memory."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

THREADS = min(os.cpu_count() or 1, 8)
# Of the tensors that are computed or wait to be written, as they are stored; what they become and
# what is made between takes about as much again.
AHEAD_BYTES = 1 << 30

Item = TypeVar("Item")
Result = TypeVar("Result")


def ahead(
    items: Iterable[Item], make: Callable[[Item], Result], nbytes: Callable[[Item], int]
) -> Iterator[Result]:
    """`make` of each item, in their order. Raises what `make` raises, at its place."""
    import torch

    waiting: deque[tuple[int, Future[Result]]] = deque()
    held_bytes = 0
    # torch and numpy work without the interpreter's lock. OpenMP threads in each would only wait.
    pool = ThreadPoolExecutor(THREADS, initializer=torch.set_num_threads, initargs=(1,))
    try:
        for item in items:
            size = nbytes(item)
            while waiting and (held_bytes + size > AHEAD_BYTES or len(waiting) > THREADS):
                done_bytes, done = waiting.popleft()
                yield done.result()
                held_bytes -= done_bytes
            waiting.append((size, pool.submit(make, item)))
            held_bytes += size
        while waiting:
            yield waiting.popleft()[1].result()
    finally:
        pool.shutdown(cancel_futures=True)

"""Several tensors at a time: in their order, within a limit of memory, errors at their place."""

from __future__ import annotations

import threading
import time

import pytest

from nibble.checkpoint.convert import ahead as module
from nibble.checkpoint.convert.ahead import ahead


def test_results_keep_the_order_of_the_items() -> None:
    def slow_at_first(item: int) -> int:
        time.sleep(0.02 if item == 0 else 0)
        return item * item

    assert list(ahead(range(20), slow_at_first, lambda _: 1)) == [item**2 for item in range(20)]


def test_no_more_bytes_are_held_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AHEAD_BYTES", 100)
    monkeypatch.setattr(module, "THREADS", 4)
    lock, held, most = threading.Lock(), 0, 0

    def make(size: int) -> int:
        nonlocal held, most
        with lock:
            held += size
            most = max(most, held)
        time.sleep(0.01)
        return size

    for size in ahead([60, 30, 50, 20, 200, 10, 40], make, lambda size: size):
        with lock:
            held -= size
    assert most == 200  # a tensor above the limit is alone


def test_an_error_comes_at_its_place_and_ends_the_rest() -> None:
    made = []

    def make(item: int) -> int:
        if item == 3:
            raise ValueError("three")
        made.append(item)
        return item

    results = ahead(range(10_000), make, lambda _: 1)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="three"):
        next(results)
    assert list(results) == []
    assert len(made) < 100

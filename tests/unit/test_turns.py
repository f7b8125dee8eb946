"""At most two processes of a test run compute at a time."""

from __future__ import annotations

from pathlib import Path

from tests.support.turns import AT_ONCE, Turns


def test_a_turn_is_taken_where_one_is_free_and_is_free_once_given_back(tmp_path: Path) -> None:
    processes = [Turns(tmp_path) for _ in range(AT_ONCE)]
    late = Turns(tmp_path)
    assert all(process.is_taken() for process in processes)
    assert not late.is_taken()
    processes[0].take()  # the second test of a group keeps the first one's turn
    processes[0].give_back()
    assert late.is_taken() and not processes[0].is_taken()

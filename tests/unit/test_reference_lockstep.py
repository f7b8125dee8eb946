"""Passes that meet at every unit: each unit is loaded once for all of them, and one failure ends
all.
"""

from __future__ import annotations

import threading
import time

import pytest

from nibble.reference.lockstep import Lockstep


def test_each_unit_is_loaded_once_for_all_passes_and_one_pass_runs_at_a_time() -> None:
    told: list[str] = []
    steps = Lockstep(
        lambda unit: told.append(f"load {unit}"), lambda unit: told.append(f"free {unit}")
    )
    running: list[int] = []

    def one(number: int) -> int:
        for unit in ("a", "b"):
            steps.arrive(unit)
            running.append(number)
            assert len(running) == 1
            told.append(f"{unit} {number}")
            running.remove(number)
        return number * 10

    assert steps.run([lambda n=n: one(n) for n in range(3)]) == [0, 10, 20]
    assert told == [
        "load a",
        "a 0",
        "a 1",
        "a 2",
        "free a",
        "load b",
        "b 0",
        "b 1",
        "b 2",
        "free b",
    ]


def test_passes_of_different_lengths_end_on_their_own() -> None:
    loads: list[str] = []
    steps = Lockstep(loads.append, lambda unit: None)

    def one(units: str) -> str:
        for unit in units:
            steps.arrive(unit)
        return units

    assert steps.run([lambda: one("ab"), lambda: one("abab")]) == ["ab", "abab"]
    assert loads == ["a", "b", "a", "b"]


@pytest.mark.parametrize("where", ["pass", "load"])
def test_a_failure_is_raised_and_leaves_no_thread_behind(where: str) -> None:
    before = threading.active_count()

    def load(unit: str) -> None:
        if where == "load" and unit == "b":
            raise OSError("the disk is gone")

    steps = Lockstep(load, lambda unit: None)

    def one(number: int) -> None:
        steps.arrive("a")
        if where == "pass" and number == 1:
            raise ValueError("no such layer")
        steps.arrive("b")

    with pytest.raises(ValueError if where == "pass" else OSError):
        steps.run([lambda n=n: one(n) for n in range(3)])
    assert threading.active_count() == before


def test_a_thread_that_begins_late_does_not_let_two_passes_run_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrive = Lockstep.arrive

    def late(steps: Lockstep, unit: str) -> None:
        if not unit and steps._own.number == 1:  # pyright: ignore[reportPrivateUsage]
            time.sleep(0.05)
        arrive(steps, unit)

    monkeypatch.setattr(Lockstep, "arrive", late)
    steps = Lockstep(lambda unit: None, lambda unit: None)
    running: list[int] = []

    def one(number: int) -> int:
        for unit in ("", "a", "b"):
            if unit:
                steps.arrive(unit)
            running.append(number)
            time.sleep(0.1 if not unit else 0.01)
            assert running == [number]
            running.remove(number)
        return number

    assert steps.run([lambda n=n: one(n) for n in range(3)]) == [0, 1, 2]

"""How long a start takes, from the last one of the same plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from nibble.serve.start_times import StartTimes, left_s

HISTORY = [
    {"phase": "start", "at_s": 0.0},
    {"phase": "load", "at_s": 5.0},
    {"phase": "warm-up", "at_s": 20.0},
    {"phase": "ready", "at_s": 32.0},
]


def test_a_start_is_kept_phase_by_phase(tmp_path: Path) -> None:
    path = tmp_path / "times" / "plan.json"
    assert StartTimes(path).last == {}
    StartTimes(path).keep(HISTORY)
    assert StartTimes(path).last == {"start": 5.0, "load": 15.0, "warm-up": 12.0}


@pytest.mark.parametrize(
    ("phase", "in_phase_s", "left"),
    [
        ("start", 2.0, 30.0),
        ("load", 5.0, 22.0),
        ("load", 99.0, 12.0),
        ("warm-up", 12.0, 0.0),
        ("compile", 1.0, None),
    ],
)
def test_what_is_left_is_the_rest_of_this_phase_and_those_after_it(
    phase: str, in_phase_s: float, left: float | None
) -> None:
    assert left_s({"start": 5.0, "load": 15.0, "warm-up": 12.0}, phase, in_phase_s) == left


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"load": "long"}'])
def test_a_damaged_record_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    assert StartTimes(tmp_path / "plan.json").last == {}


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    StartTimes(tmp_path / "file" / "plan.json").keep(HISTORY)

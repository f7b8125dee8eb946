"""The display without a terminal and with one (a pseudo-terminal), and the reports of a stall."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys

import pytest

from nibble.engine.log import PhaseUpdate
from nibble.serve.progress import Display, StallWatch, describe
from tests.support.paths import ROOT


def test_without_a_terminal_there_is_one_line_a_phase_and_one_a_quarter(
    capfd: pytest.CaptureFixture[str],
) -> None:
    display = Display(silence=lambda: 0.0, live=False)
    display.start()
    display.show(PhaseUpdate("load"))
    for percent in range(0, 101, 2):
        display.show(PhaseUpdate("load", percent / 100))
    display.show(PhaseUpdate("capture", 0.0, "Capturing CUDA graphs"))
    display.stop()
    assert capfd.readouterr().err.splitlines() == [
        "[nibble] load",
        "[nibble] load: 26 %",
        "[nibble] load: 52 %",
        "[nibble] load: 78 %",
        "[nibble] capture: 0 %, Capturing CUDA graphs",
    ]


def test_output_of_the_engine_goes_through_unchanged_to_the_same_stream(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    display = Display(silence=lambda: 0.0, live=False)
    display.pass_through(1, b"\xff\x00 raw\n")
    display.pass_through(2, b"\rbar 50%")
    display.say("a line of ours")
    out, err = capfdbinary.readouterr()
    assert out == b"\xff\x00 raw\n"
    assert err == b"\rbar 50%\n[nibble] a line of ours\n"


def test_a_reader_that_went_away_does_not_stop_us() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    Display(silence=lambda: 0.0, live=False).pass_through(writing, b"nobody reads this")
    os.close(writing)


SHOW = """
import time
from nibble.engine.log import PhaseUpdate
from nibble.serve.progress import Display
display = Display(silence=lambda: 7.0)
display.start()
display.show(PhaseUpdate("load", 0.62, "5.83 GiB"))
display.pass_through(1, b"(Worker pid=1) INFO [x] a line of vLLM's\\n")
time.sleep(0.6)
display.stop()
display.say("ready in 1.0 s")
"""


def run_on_terminal(program: str) -> str:
    """What a terminal receives from a Python program."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=theirs, stdout=theirs, stderr=theirs, env=environ
    )
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # EIO once the other side is closed
        while data := os.read(ours, 4096):
            seen += data
    os.close(ours)
    assert process.wait() == 0, seen
    return seen.decode()


def test_on_a_terminal_phase_elapsed_time_and_last_sign_of_life_are_shown_and_the_log_passes() -> (
    None
):
    seen = run_on_terminal(SHOW)
    assert "load: 62 %, 5.83 GiB" in seen
    assert "s in all; last progress 7 s ago" in seen
    assert "(Worker pid=1) INFO [x] a line of vLLM's" in seen
    assert "[nibble] ready in 1.0 s" in seen


def test_a_stall_is_reported_once_a_period_and_again_after_the_next() -> None:
    watch = StallWatch(10)
    assert [silence for silence in range(35) if watch.due(silence)] == [10, 20, 30]


def test_a_sign_of_life_starts_the_period_anew() -> None:
    watch = StallWatch(10)
    assert watch.due(12)
    assert not watch.due(1)
    assert not watch.due(9)
    assert watch.due(11)


@pytest.mark.parametrize(
    ("update", "text"),
    [
        (PhaseUpdate("load", 0.625, "3 GiB"), "load: 62 %, 3 GiB"),
        (PhaseUpdate("warm-up"), "warm-up"),
        (PhaseUpdate("compile", None, "size 4"), "compile: size 4"),
    ],
)
def test_a_phase_in_words(update: PhaseUpdate, text: str) -> None:
    assert describe(update.phase, update.progress, update.detail) == text

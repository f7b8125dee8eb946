"""Starts a process for each trial, follows its phases, and ends one that exceeds a limit."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from nibble.machine.paths import root
from nibble.machine.processes import run_delay_s
from nibble.printable import printable
from nibble.trials.trial import PHASE_LIMITS, START_S, Outcome, Trial, ended_early, out_of_time

END_S = 10.0  # for the driver to take a killed process's kernels from the GPU
LINE_CHARS = 300
LONGEST_WAIT = 5  # times a phase's limit, for a CPU that others use
# Secrets and settings of servers that a kernel's process does not need.
WITHHELD = ("TOKEN", "SECRET", "PASSWORD", "API_KEY", "CREDENTIAL")

Done = Callable[[Outcome], None]


def run_trials(
    trials: Sequence[Trial],
    environ: Mapping[str, str],
    *,
    at_once: int = 1,
    work_s: float | None = None,
    until: float | None = None,
    on_done: Done = lambda outcome: None,
) -> list[Outcome]:
    """The outcomes, in the order of `trials`; nothing that a kernel does raises here.

    at_once: processes at a time; they measure time one after the other all the same. work_s:
    seconds that each may take after it has started; until: time.monotonic() at which all end.
    """
    with tempfile.TemporaryDirectory(prefix="nibble-trials-") as folder:
        lock = str(Path(folder) / "time")

        def run(trial: Trial) -> Outcome:
            if until is not None and time.monotonic() >= until:
                outcome = out_of_time(trial)
            else:
                began = time.monotonic()
                outcome = _Process(replace(trial, lock=lock), environ, work_s, until).outcome()
                outcome = replace(outcome, seconds=round(time.monotonic() - began, 2))
            on_done(outcome)
            return outcome

        with ThreadPoolExecutor(max(1, at_once)) as pool:
            return list(pool.map(run, trials))


def environment(trial: Trial, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a trial's process: without secrets, and without GPUs for the CPU."""
    kept = {
        name: value
        for name, value in environ.items()
        if not any(word in name.upper() for word in WITHHELD)
    }
    path = os.pathsep.join(filter(None, [str(root()), environ.get("PYTHONPATH")]))
    added = {"PYTHONPATH": path, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    # On a busy machine, threads that spin at a barrier keep the CPU from those they wait for.
    added["OMP_WAIT_POLICY"] = "PASSIVE"
    if trial.device == "cpu":
        added["CUDA_VISIBLE_DEVICES"] = ""
    return {**kept, **added}


class _Process:
    """One trial in its process."""

    def __init__(
        self,
        trial: Trial,
        environ: Mapping[str, str],
        work_s: float | None,
        until: float | None,
    ) -> None:
        self._trial, self._environ = trial, environment(trial, environ)
        self._work_s, self._until = work_s, until
        self._phase, self._since, self._delay_s = "start", time.monotonic(), 0.0
        self._pid = 0
        self._work_until: float | None = None
        self._times: dict[str, dict[str, float]] = {}

    def outcome(self) -> Outcome:
        with tempfile.TemporaryFile() as errors:
            child = subprocess.Popen(
                [sys.executable, "-m", "nibble.trials.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=self._environ,
                start_new_session=True,  # so that its children end with it
            )
            self._pid = child.pid
            try:
                return self._follow(child, errors)
            finally:
                _end(child)

    def _follow(self, child: subprocess.Popen[bytes], errors: IO[bytes]) -> Outcome:
        assert child.stdin is not None and child.stdout is not None
        with suppress(BrokenPipeError):
            child.stdin.write(json.dumps(self._trial.to_json()).encode() + b"\n")
            child.stdin.close()
        descriptor, rest = child.stdout.fileno(), b""
        with selectors.DefaultSelector() as ready:
            ready.register(descriptor, selectors.EVENT_READ)
            while True:
                left = self._end_of_phase() - time.monotonic()
                if left <= 0 and (left := self._end_on_a_busy_machine() - time.monotonic()) <= 0:
                    return self._at_a_limit()
                if not ready.select(left):
                    continue
                piece = os.read(descriptor, 1 << 16)
                if not piece:
                    return self._ended(child, errors)
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if (outcome := self._read(line)) is not None:
                        return outcome

    def _read(self, line: bytes) -> Outcome | None:
        """Take one line; the outcome if it is the result."""
        try:
            message: Any = json.loads(line)
            if "phase" in message:
                self._enter(str(message["phase"]))
            self._times |= message.get("times", {})
            if "result" in message:
                return Outcome.from_json({"name": self._trial.name, **message["result"]})
        except (ValueError, TypeError, AttributeError) as error:
            return Outcome(self._trial.name, "crashed", f"its result cannot be read ({error})")
        return None

    def _enter(self, phase: str) -> None:
        if self._phase == "start" and phase != "start" and self._work_s is not None:
            self._work_until = time.monotonic() + self._work_s
        self._phase, self._since, self._delay_s = phase, time.monotonic(), run_delay_s(self._pid)

    def _end_of_phase(self, extension_s: float = 0.0) -> float:
        """When the phase, the work or all trials have to end, on the clock of time.monotonic."""
        kind = self._phase.partition(":")[0]
        limit = float("inf") if kind == "wait" else PHASE_LIMITS.get(kind, START_S)
        ends = [self._since + limit + extension_s, self._work_until, self._until]
        return min(end for end in ends if end is not None)

    def _end_on_a_busy_machine(self) -> float:
        """The same, later by the time in which the process waited for a CPU: other programs slow a
        kernel down, and it does not hang.
        """
        waited = run_delay_s(self._pid) - self._delay_s
        limit = PHASE_LIMITS.get(self._phase.partition(":")[0], START_S)
        return self._end_of_phase(min(max(0.0, waited), LONGEST_WAIT * limit))

    def _at_a_limit(self) -> Outcome:
        now = time.monotonic()
        others = [end for end in (self._work_until, self._until) if end is not None]
        if any(now >= end for end in others):
            return replace(out_of_time(self._trial), times=self._times)
        return ended_early(self._trial, self._phase, None, "")

    def _ended(self, child: subprocess.Popen[bytes], errors: IO[bytes]) -> Outcome:
        """The process closed its output without a result."""
        with suppress(subprocess.TimeoutExpired):
            child.wait(END_S)
        code = child.returncode
        return ended_early(self._trial, self._phase, 1 if code is None else code, _last(errors))


def _last(errors: IO[bytes]) -> str:
    """The last line of stderr that says something, such as an exception's."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - (1 << 16)))
    lines = errors.read().decode(errors="replace").splitlines()
    # torch adds advice below a CUDA error; the error itself names the fault.
    named = [line for line in lines if "Error: " in line or line.startswith("Fatal Python")]
    spoken = [line for line in lines if line.strip()]
    return printable((named or spoken or [""])[-1].strip())[:LINE_CHARS]


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the process and what it has started. A kernel that does not stop may delay its end."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        child.wait(END_S)
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()

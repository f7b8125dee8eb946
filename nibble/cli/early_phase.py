"""The phases of a start before vLLM: /status answers and a stop signal ends the start."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from nibble.cli.common import say
from nibble.errors import ExitCode
from nibble.hub.progress import OnProgress, Progress, Stage, as_lines
from nibble.machine.processes import stop_signals
from nibble.plan.gather import Asked
from nibble.serve.background import Place, note_end
from nibble.serve.control import ControlServer


@contextmanager
def early_phase(asked: Asked, doing: str = "downloading") -> Iterator[OnProgress]:
    """Answer /status and handle signals during a download, trials of kernels or the computation of
    a reference; the supervisor does both later.
    """
    stages: Mapping[str, Stage] = {"downloading": "download", "trying kernels": "trials"}
    phase: Stage = stages.get(doing, "reference")
    since, step = datetime.now(UTC).isoformat(timespec="seconds"), Progress(phase, 0, 0)
    lines = as_lines(say)

    def report(now: Progress) -> None:
        nonlocal step
        step = now
        lines(now)

    def status() -> dict[str, Any]:
        share = step.done_bytes / step.total_bytes if step.total_bytes else None
        found = {
            "state": "starting",
            "phase": step.stage,
            "progress": share,
            "detail": asdict(step),
        }
        return found | {"since": since, "pid": os.getpid()}

    def stop(signum: int) -> None:
        """End at once: no server runs yet, and threads of the download would delay an ordinary
        exit.
        """
        say(f"stopped while {doing}; the next start continues from here")
        with suppress(OSError):
            note_end(Place(asked.cache, asked.settings.port), ExitCode.OK)
        os._exit(ExitCode.OK)

    control = ControlServer(asked.settings.control_port, status, lambda: False)
    control.start()
    try:
        with stop_signals(stop):
            yield report
    finally:
        control.close()

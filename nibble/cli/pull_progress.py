"""Shows a pull's progress: a bar for each stage on a terminal, else a line now and then."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nibble.hub.progress import OnProgress, Progress, as_lines
from nibble.serve.progress import stderr_is_terminal


@contextmanager
def shown(say: Callable[[str], None]) -> Iterator[OnProgress]:
    """What to tell of each step while this is open."""
    if not stderr_is_terminal() or os.environ.get("TERM") == "dumb":
        yield as_lines(say)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("[nibble] {task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
    )
    with Bars(
        *columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True)
    ) as bars:
        tasks = {}

        def report(step: Progress) -> None:
            if step.stage not in tasks:
                tasks[step.stage] = bars.add_task(step.stage, total=step.total_bytes)
            bars.update(tasks[step.stage], completed=step.done_bytes, total=step.total_bytes)

        yield report

"""`nibble soak`: mixed load for minutes or hours, and a verdict."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from nibble.bench.served import find_served
from nibble.bench.soak import soak as run
from nibble.bench.verdict import MIB, Soak, problems
from nibble.cli.common import INTERRUPTED, print_json, say
from nibble.cli.status import status_at
from nibble.cli.tables import plain_table, wide_console
from nibble.errors import ExitCode
from nibble.machine.out_path import create
from nibble.serve.endpoint import endpoint_at, local_endpoint
from nibble.serve.progress import stderr_is_terminal

VERB = "soak"
_EVERY_S = 60.0  # a line where stderr is not a terminal


def soak(
    url: str | None,
    minutes: float,
    concurrency: int,
    model: str | None,
    out: Path | None,
    environ: Mapping[str, str],
    as_json: bool,
) -> int:
    """Load the server and print the verdict; the exit code."""
    endpoint = endpoint_at(url, environ) if url else local_endpoint(environ)
    served = find_served(endpoint, environ, VERB, model)
    if out is not None:
        create(out)

    def engine_pid() -> int | None:
        return status_at(endpoint, environ).get("engine_pid")

    with _progress(minutes * 60) as tell:
        try:
            found = run(endpoint, served, minutes * 60, concurrency, engine_pid, tell)
        except OSError as error:
            raise endpoint.no_answer(error, environ, VERB) from None
    if out is not None:
        out.write_text(json.dumps(found.to_json(), indent=1) + "\n")
    print_json(found.to_json()) if as_json else _show(found)
    return exit_code(found)


def exit_code(found: Soak) -> int:
    """0 for steady, 6 for a failed verdict, 10 where the server is gone, 130 after Ctrl-C."""
    if found.ended == "interrupted":
        return INTERRUPTED
    if found.samples and not found.samples[-1].answers:
        return int(ExitCode.ENGINE_DIED)
    return int(ExitCode.VERIFY if problems(found) else ExitCode.OK)


@contextlib.contextmanager
def _progress(total_s: float) -> Iterator[Callable[[Mapping[str, float]], None]]:
    """Tells of each look at the server: a bar on a terminal, else a line a minute."""
    if not stderr_is_terminal():
        told = -_EVERY_S

        def tell(now: Mapping[str, float]) -> None:
            nonlocal told
            if now["seconds"] - told >= _EVERY_S:
                told = now["seconds"]
                say(_line(now))

        yield tell
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("[nibble] {task.description}", markup=False), BarColumn(),
               TimeElapsedColumn(), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("starts", total=total_s)

        def show(now: Mapping[str, float]) -> None:
            bars.update(task, completed=now["seconds"], description=_line(now))

        yield show


def _line(now: Mapping[str, float]) -> str:
    memory = f", {now['memory_bytes'] / MIB:.0f} MiB" if now["memory_bytes"] else ""
    return (
        f"{now['seconds'] / 60:.1f} min, {now['done']:.0f} requests, {now['failed']:.0f} failed"
        f"{memory}, drift {now['drift']:.4f}"
    )


def _show(found: Soak) -> None:
    table = plain_table("requests", "answered", "failed", "refused")
    for kind in sorted({*found.done, *found.failed, *found.refused}):
        counts = (found.done.get(kind, 0), found.failed.get(kind, 0), found.refused.get(kind, 0))
        table.add_row(kind, *(str(count) for count in counts))
    wide_console().print(table)
    for kind, why in found.left_out.items():
        print(f"left out: {kind}: {why}")
    if found.memory_bytes is None:
        print("memory: not visible; the server is not nibble's on this machine")
    else:
        growth = found.growth_bytes
        grew = "too few samples to judge" if growth is None else f"grew by {growth / MIB:.0f} MiB"
        print(f"memory: {found.memory_bytes / MIB:.0f} MiB at most, {grew}")
    print(f"restarts: {found.restarts}")
    print(f"drift: {found.worst_drift:.4f} nats a token at most, {len(found.drifts)} comparisons")
    if found.seeded_same is not None:
        print(f"seeded answers: {100 * found.seeded_same:.0f} % are equal")
    for problem in problems(found):
        print(f"problem: {problem}")
    print(f"verdict: {'failed' if problems(found) else 'steady'} ({found.seconds / 60:.1f} min)")

"""`nibble cache ls|verify|prune`: looks after compiled code."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from nibble.cli.common import Json, print_json
from nibble.errors import ExitCode, NibbleError

if TYPE_CHECKING:
    from nibble.serve.compile_cache import Entry

DAY_S = 86400.0

app = typer.Typer(no_args_is_help=True, help="Compiled code that the next start reuses.")


@app.command("ls")
def cache_ls(as_json: Json = False) -> None:
    """Every entry: its size, what it is for, when it was used last."""
    from nibble.engine.installed import compiled_id

    there = found(dict(os.environ))
    print_json([entry.to_json() for entry in there]) if as_json else show(there, compiled_id())


@app.command("verify")
def cache_verify(as_json: Json = False) -> None:
    """Compare each entry with its record; drop what differs. The next start compiles it again."""
    results = verify(dict(os.environ))
    if as_json:
        print_json([vars(result) for result in results])
    else:
        for result in results:
            print(result.line())
        print(f"{len(results)} entries compared")


@app.command("prune")
def cache_prune(
    older_than: Annotated[
        float | None,
        typer.Option("--older-than", metavar="DAYS", help="Remove entries unused for longer."),
    ] = None,
    max_gib: Annotated[
        float | None,
        typer.Option("--max-gib", help="Remove the least recently used until the rest fits."),
    ] = None,
    all_but_current: Annotated[
        bool,
        typer.Option(
            "--all-but-current", help="Remove entries of builds other than the installed one."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what it would remove.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove entries no server uses, by age, size or build."""
    gone = prune(dict(os.environ), older_than, max_gib, all_but_current, dry_run)
    if as_json:
        print_json([entry.to_json() for entry in gone])
    else:
        freed = sum(entry.size_bytes for entry in gone)
        for entry in gone:
            print(f"{'would remove' if dry_run else 'removed'} {entry.folder}")
        print(f"{len(gone)} entries, {freed} bytes")


@dataclass(frozen=True)
class Verified:
    """The result for one entry; `problems` lists what differs from its record."""

    name: str
    state: Literal["sound", "not recorded", "dropped", "damaged, in use"]
    problems: tuple[str, ...] = ()

    def line(self) -> str:
        """One line for the terminal."""
        more = f" and {len(self.problems) - 1} more" if len(self.problems) > 1 else ""
        return f"{self.name}: {self.state}" + (
            f": {self.problems[0]}{more}" if self.problems else ""
        )


def cache_root(environ: Mapping[str, str]) -> Path:
    """The folder of all entries. Raises CONFIG where this user may not read it."""
    from nibble.plan.compile_cache import FOLDER
    from nibble.plan.gather import read_wishes

    root = read_wishes([], environ).cache / FOLDER
    try:
        os.listdir(root)
    except PermissionError as error:
        what = f"{root} cannot be read ({error.strerror})"
        raise NibbleError(
            ExitCode.CONFIG, what=what, action="run it as the owner of the cache"
        ) from None
    except OSError:  # no cache exists
        pass
    return root


def found(environ: Mapping[str, str]) -> list[Entry]:
    """Every entry, the most recently used first."""
    from nibble.serve.compile_cache import entries

    return entries(cache_root(environ))


def show(there: Sequence[Entry], build: str) -> None:
    """The entries as a table."""
    from rich.markup import escape

    from nibble.cli.tables import plain_table, wide_console
    from nibble.machine.disk import gib

    table = plain_table("entry", "size", "last used", "for")
    for entry in there:
        notes = [
            name
            for name, holds in (("in use", entry.is_used), ("not recorded", not entry.is_recorded))
            if holds
        ]
        notes += ["another build"] if entry.parts.get("build") != build else []
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used_s))
        parts = [
            entry.parts[name] for name in ("model", "arch", "vllm", "build") if name in entry.parts
        ]
        parts += [entry.parts["flags"]] if entry.parts.get("flags", "{}") != "{}" else []
        what = ", ".join(parts) + (f" ({'; '.join(notes)})" if notes else "")
        table.add_row(entry.folder.name, gib(entry.size_bytes), when, escape(what))
    console = wide_console()
    if there:
        console.print(table)
    console.print(f"{len(there)} entries, {gib(sum(entry.size_bytes for entry in there))}")


def verify(environ: Mapping[str, str]) -> list[Verified]:
    """Compare every entry with its record; drop damaged entries that no server uses."""
    from nibble.serve.compile_cache import entries, sweep

    root = cache_root(environ)
    sweep(root)
    return [_verified(entry) for entry in entries(root)]


def _verified(entry: Entry) -> Verified:
    from nibble.serve.compile_record import damage

    name = entry.folder.name
    if problems := tuple(damage(entry.folder)):
        return Verified(name, "dropped" if _drop(entry) else "damaged, in use", problems)
    return Verified(name, "sound" if entry.is_recorded else "not recorded")


def prune(
    environ: Mapping[str, str],
    older_than_days: float | None,
    max_gib: float | None,
    all_but_current: bool,
    dry_run: bool,
) -> list[Entry]:
    """Remove entries and return them; with `dry_run` only select them.

    Raises USAGE without a condition, CONFIG where this user cannot remove an entry.
    """
    from nibble.engine.installed import compiled_id
    from nibble.serve.compile_cache import entries, sweep, to_prune

    if older_than_days is None and max_gib is None and not all_but_current:
        action = "pass --older-than DAYS, --max-gib N or --all-but-current"
        raise NibbleError(
            ExitCode.USAGE, what="`nibble cache prune` needs a condition", action=action
        )
    for flag, value in (("--older-than", older_than_days), ("--max-gib", max_gib)):
        if value is not None and not 0 <= value < math.inf:
            raise NibbleError(
                ExitCode.USAGE,
                what=f"{flag} is {value}",
                expected="a number from 0 up",
                action="correct it",
            )
    root = cache_root(environ)
    if not dry_run:
        sweep(root)
    chosen = to_prune(
        entries(root),
        time.time(),
        None if older_than_days is None else older_than_days * DAY_S,
        None if max_gib is None else int(max_gib * (1 << 30)),
        compiled_id() if all_but_current else None,
    )
    return chosen if dry_run else [entry for entry in chosen if _drop(entry)]


def _drop(entry: Entry) -> bool:
    from nibble.serve.compile_cache import drop

    try:
        return drop(entry.folder)
    except OSError as error:
        what = f"{entry.folder} cannot be removed ({error.strerror})"
        raise NibbleError(
            ExitCode.CONFIG, what=what, action="run it as the owner of the cache"
        ) from None

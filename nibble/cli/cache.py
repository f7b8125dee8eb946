"""`nibble cache ls|verify|prune`: looks after compiled code."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nibble.engine.installed import compiled_id
from nibble.errors import ExitCode, NibbleError
from nibble.machine.disk import gib
from nibble.plan.compile_cache import FOLDER
from nibble.plan.gather import read_wishes
from nibble.serve.compile_cache import Entry, damage, drop, entries, sweep, to_prune

DAY_S = 86400.0


@dataclass(frozen=True)
class Verified:
    """What was found of one entry; `problems` where it is not sound."""

    name: str
    state: Literal["sound", "not recorded", "dropped", "damaged, in use"]
    problems: tuple[str, ...] = ()

    def line(self) -> str:
        """For people."""
        more = f" and {len(self.problems) - 1} more" if len(self.problems) > 1 else ""
        return f"{self.name}: {self.state}" + (
            f": {self.problems[0]}{more}" if self.problems else ""
        )


def cache_root(environ: Mapping[str, str]) -> Path:
    """The folder of all entries. Raises CONFIG where this user may not look into it."""
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
    """Every entry, the one used last first."""
    return entries(cache_root(environ))


def show(there: Sequence[Entry], build: str) -> None:
    """The entries as a table."""
    from rich.markup import escape

    from nibble.cli.show import plain_table, wide_console

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
    """Read every entry; drop what is damaged and not in use."""
    root = cache_root(environ)
    sweep(root)
    return [_verified(entry) for entry in entries(root)]


def _verified(entry: Entry) -> Verified:
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
    """Remove entries; those that are gone (or would be). Raises USAGE without any limit, CONFIG
    where nothing can be removed.
    """
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
    try:
        return drop(entry.folder)
    except OSError as error:
        what = f"{entry.folder} cannot be removed ({error.strerror})"
        raise NibbleError(
            ExitCode.CONFIG, what=what, action="run it as the owner of the cache"
        ) from None

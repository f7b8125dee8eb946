"""What a row of the bad-input table is, and how its message is compared."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.servers.hub import Hub


@dataclass
class Place:
    """Where a case runs: its folder, the local Hub, and the tiny model in it."""

    tmp: Path
    hub: Hub
    model: Path


@dataclass(frozen=True)
class Case:
    """One command: words after `nibble`, variables, what to prepare, and who runs it (root may
    do everything).
    """

    words: tuple[str, ...] = ("serve", "{model}")
    env: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[Place], Any] | None = None
    as_another_user: bool = False


@dataclass(frozen=True)
class Row:
    """One row of the table; every case of it must end with `code` and `message`."""

    id: str
    input: str
    code: int
    message: str
    cases: tuple[Case, ...]


def row(id: str, input: str, code: int, message: str, *cases: Case) -> Row:
    """A row of the table."""
    return Row(id, input, code, message, cases)


def env(words: tuple[str, ...] = ("serve", "{model}"), **variables: str) -> Case:
    """A case made of variables."""
    return Case(words, variables)


def serve(*words: str, prepare: Callable[[Place], Any] | None = None, **variables: str) -> Case:
    """A case made of words after `nibble serve`."""
    return Case(("serve", *words), variables, prepare)


def serve_as_another_user(*words: str, prepare: Callable[[Place], Any], **variables: str) -> Case:
    """The same, run by uid 2000."""
    return Case(("serve", *words), variables, prepare, as_another_user=True)


@dataclass(frozen=True)
class Ignored:
    """Input that looks wrong and is not, or that nibble puts right: it goes on and says so.
    `prepare` makes {tmp}/broken.
    """

    id: str
    input: str
    notice: str
    env: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[Place], Any] | None = None


def pattern(message: str) -> re.Pattern[str]:
    """A message as a pattern of the whole line: `…` matches anything."""
    return re.compile(".*".join(re.escape(part) for part in message.split("…")))


def file(name: str, content: bytes) -> Callable[[Place], Any]:
    """Prepares the file {tmp}/`name`."""
    return lambda place: (place.tmp / name).write_bytes(content)


def subfolder(name: str) -> Callable[[Place], Any]:
    """Prepares the folder {tmp}/`name`."""
    return lambda place: (place.tmp / name).mkdir(mode=0o755)

"""Applies unified diffs strictly: each line of a hunk must match, and only its position may differ.

Pure functions on text. nibble does not call `git apply`, because `make serve` needs only Python,
pip and make. The series is small and its files are pinned by sha256, so a part of `git apply` is
enough; tests compare the results.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class DiffError(Exception):
    """A text is not a valid diff, or a hunk does not apply."""


@dataclass(frozen=True)
class Hunk:
    """A hunk: its lines before and after, with line ends.

    start: number of the first line in the old file, from 1.
    """

    start: int
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class FileChange:
    """The hunks for one file, in order. `path` is without the prefix a/ or b/."""

    path: str
    hunks: tuple[Hunk, ...]


def parse(text: str) -> list[FileChange]:
    """The changes of a diff. Ignores the header before the first `---` line. Raises DiffError."""
    lines = text.splitlines(keepends=True)
    changes: list[FileChange] = []
    at = 0
    while at < len(lines):
        if not (
            lines[at].startswith("--- ")
            and at + 1 < len(lines)
            and lines[at + 1].startswith("+++ ")
        ):
            at += 1
            continue
        path = _path(lines[at], lines[at + 1])
        hunks, at = _hunks(lines, at + 2)
        if not hunks:
            raise DiffError(f"{path} has no hunk")
        changes.append(FileChange(path, tuple(hunks)))
    if not changes:
        raise DiffError("it has no diff")
    return changes


def _path(old: str, new: str) -> str:
    """The path of a change. Raises DiffError for a diff that creates, removes or renames a file."""
    before, after = (line[4:].split("\t")[0].strip() for line in (old, new))
    if not before.startswith("a/") or not after.startswith("b/") or before[2:] != after[2:]:
        raise DiffError(
            f"it changes {before} to {after}, not lines of one file (a/PATH and b/PATH)"
        )
    if ".." in before.split("/") or before[2:].startswith("/"):
        raise DiffError(f"{before} leaves the tree")
    return before[2:]


def _hunks(lines: list[str], at: int) -> tuple[list[Hunk], int]:
    hunks: list[Hunk] = []
    while at < len(lines) and (head := HUNK.match(lines[at])):
        old_count, new_count = (int(head.group(n) or 1) for n in (2, 4))
        before: list[str] = []
        after: list[str] = []
        at += 1
        while at < len(lines) and (
            len(before) < old_count or len(after) < new_count or lines[at][0] == "\\"
        ):
            mark, rest = lines[at][0], lines[at][1:]
            if mark == "\\":  # "\ No newline at end of file" refers to the line above
                _cut_line_end(lines[at - 1][0], before, after)
            elif mark not in " -+\n":
                break
            else:
                # Some editors strip the space of an empty context line.
                rest = rest if mark != "\n" else "\n"
                before += [rest] if mark != "+" else []
                after += [rest] if mark != "-" else []
            at += 1
        if (len(before), len(after)) != (old_count, new_count):
            raise DiffError(
                f"the hunk at line {head.group(1)} is shorter or longer than its header says"
            )
        hunks.append(Hunk(int(head.group(1)), tuple(before), tuple(after)))
    return hunks, at


def _cut_line_end(mark: str, before: list[str], after: list[str]) -> None:
    if mark != "+":
        before[-1] = before[-1].rstrip("\n")
    if mark != "-":
        after[-1] = after[-1].rstrip("\n")


def apply(text: str, change: FileChange) -> str:
    """The text after the change. Raises DiffError if the lines of a hunk are not in the text.

    Each hunk applies after the hunk before it, at the position nearest to its line number.
    """
    lines = text.splitlines(keepends=True)
    changed: list[str] = []  # the new lines before `rest`
    rest, consumed = lines, 0
    for hunk in change.hunks:
        place = _find(rest, hunk.before, hunk.start - 1 - consumed)
        if place is None:
            raise DiffError(f"{change.path}: the lines around {hunk.start} differ from the patch's")
        changed += [*rest[:place], *hunk.after]
        consumed += place + len(hunk.before)
        rest = rest[place + len(hunk.before) :]
    return "".join([*changed, *rest])


def _find(lines: list[str], wanted: tuple[str, ...], guess: int) -> int | None:
    """The index of `wanted` in `lines` that is nearest to `guess`; None if it is not there."""
    last = len(lines) - len(wanted)
    for place in sorted(range(last + 1), key=lambda number: abs(number - guess)):
        if tuple(lines[place : place + len(wanted)]) == wanted:
            return place
    return None

"""Applies unified diffs strictly: every line of a hunk must match; only its place may move.

Pure functions on text. The series is small and its files are pinned by sha256, so this is the part
of `git apply` that is needed; tests compare the two. It is not git because `make serve` promises to
need only Python, pip and make.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class DiffError(Exception):
    """Text that is not a readable diff, or a hunk that does not apply."""


@dataclass(frozen=True)
class Hunk:
    """Lines (with their line ends) before and after; `start` is the first line's number before,
    counted from 1.
    """

    start: int
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class FileChange:
    """All hunks for one file, in order; `path` without the a/ or b/."""

    path: str
    hunks: tuple[Hunk, ...]


def parse(text: str) -> list[FileChange]:
    """The changes of a diff; text before the first `---` line is a header and not read. Raises
    DiffError.
    """
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
    """The one path of a change. Files are neither made, removed nor renamed: our patches change
    lines.
    """
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
            if mark == "\\":  # "\ No newline at end of file" is about the line above
                _cut_line_end(lines[at - 1][0], before, after)
            elif mark not in " -+\n":
                break
            else:
                # An empty context line whose space was stripped
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
    """The file after the change. Raises DiffError where a hunk's lines are not in it exactly
    once near their place.
    """
    lines = text.splitlines(keepends=True)
    done: list[str] = []  # what lies before `rest`, already changed
    rest, taken = lines, 0
    for hunk in change.hunks:
        place = _find(rest, hunk.before, hunk.start - 1 - taken)
        if place is None:
            raise DiffError(f"{change.path}: the lines around {hunk.start} differ from the patch's")
        done += [*rest[:place], *hunk.after]
        taken += place + len(hunk.before)
        rest = rest[place + len(hunk.before) :]
    return "".join([*done, *rest])


def _find(lines: list[str], wanted: tuple[str, ...], guess: int) -> int | None:
    """Where `wanted` stands in `lines`, nearest to `guess`."""
    last = len(lines) - len(wanted)
    for place in sorted(range(last + 1), key=lambda number: abs(number - guess)):
        if tuple(lines[place : place + len(wanted)]) == wanted:
            return place
    return None

"""Reads patches/PROJECT: a quilt series with DEP-3 headers, and the sha256 of the patched files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nibble.engine.patching.diff import DiffError, FileChange, parse
from nibble.errors import ExitCode, NibbleError
from nibble.machine.paths import root

# https://dep-team.pages.debian.net/deps/dep3/ and three headers of nibble (docs/patches.md).
HEADERS = (
    "Description",
    "Origin",
    "Bug",
    "Forwarded",
    "Last-Update",
    "X-Applies-To",
    "X-Reason",
    "X-Remove-When",
)
REASONS = ("temporary", "build", "ours")
PRISTINE = "pristine.sha256"


@dataclass(frozen=True)
class Patch:
    """A patch file: its headers and its changes."""

    name: str  # the file's name without .patch
    headers: Mapping[str, str]
    changes: tuple[FileChange, ...]
    sha256: str

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that it changes."""
        return tuple(change.path for change in self.changes)

    @property
    def summary(self) -> str:
        """The first line of the description."""
        return self.headers["Description"].splitlines()[0]


@dataclass(frozen=True)
class Series:
    """The patches for one release of a project, in order."""

    project: str
    release: str
    patches: tuple[Patch, ...]
    pristine: Mapping[str, str]  # path -> sha256 before any patch


def load_series(project: str, folder: Path | None = None) -> Series:
    """Read patches/PROJECT. Raises NibbleError (exit 6) if a file is missing, unlisted or invalid.

    folder: another folder to read, for tests.
    """
    folder = folder or root() / "patches" / project
    listed = _listed(folder)
    unlisted = sorted({path.stem for path in folder.glob("*.patch")} - set(listed))
    if unlisted:
        _refuse(
            f"{folder}/{unlisted[0]}.patch is not in {folder}/series",
            "a line for every patch",
            "list or remove it",
        )
    patches = tuple(_read_patch(folder / f"{name}.patch", folder) for name in listed)
    releases = {patch.headers["X-Applies-To"].removeprefix(f"{project}==") for patch in patches}
    if len(releases) != 1:
        _refuse(
            f"the patches of {folder} are for {sorted(releases)}",
            "one release",
            "correct X-Applies-To",
        )
    pristine = _pristine(folder)
    for patch in patches:
        for path in patch.paths:
            if path not in pristine:
                _refuse(
                    f"{folder}/{PRISTINE} lacks {path} of {patch.name}",
                    "the sha256 of every touched file",
                    "add the line that `sha256sum` prints for the unpatched file",
                )
    return Series(project, releases.pop(), patches, pristine)


def _listed(folder: Path) -> list[str]:
    try:
        text = (folder / "series").read_text(encoding="utf-8")
    except OSError as error:
        _refuse(
            f"cannot read {folder}/series ({error.strerror})",
            "a list of patches",
            "restore it from the repository",
        )
    names = [line.split("#")[0].strip() for line in text.splitlines()]
    names = [name for name in names if name]
    for name in names:
        if not name.endswith(".patch") or "/" in name:
            _refuse(
                f"{folder}/series has the line {name!r}",
                "names of .patch files, one a line",
                "correct it",
            )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        _refuse(f"{folder}/series lists {twice[0]} twice", "each once", "remove one")
    return [name.removesuffix(".patch") for name in names]


def _read_patch(path: Path, folder: Path) -> Patch:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        _refuse(
            f"{folder}/series lists {path.name}, which cannot be read ({error.strerror})",
            "a file for every entry",
            "restore it from the repository",
        )
    headers = read_headers(text)
    missing = [name for name in HEADERS if not headers.get(name)]
    if missing:
        _refuse(
            f"{path} has no {', '.join(missing)}", "the headers " + ", ".join(HEADERS), "write them"
        )
    if headers["X-Reason"] not in REASONS:
        _refuse(f"{path} has X-Reason {headers['X-Reason']!r}", " or ".join(REASONS), "correct it")
    try:
        changes = tuple(parse(text))
    except DiffError as error:
        _refuse(
            f"{path} is not a patch for nibble: {error}",
            "a unified diff of existing files",
            "generate it again",
        )
    return Patch(path.stem, headers, changes, hashlib.sha256(text.encode()).hexdigest())


def read_headers(text: str) -> dict[str, str]:
    """The DEP-3 fields above the diff. A line that begins with a space continues a field."""
    headers: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("--- "):
            break
        field = re.match(r"([A-Z][A-Za-z-]*): *(.*)", line)
        if field:
            name = field.group(1)
            headers[name] = field.group(2).strip()
        elif line.startswith(" ") and name:
            headers[name] += "\n" + line.strip()
    return headers


def _pristine(folder: Path) -> dict[str, str]:
    try:
        text = (folder / PRISTINE).read_text(encoding="utf-8")
    except OSError as error:
        _refuse(
            f"cannot read {folder}/{PRISTINE} ({error.strerror})",
            "lines of `sha256sum`",
            "restore it from the repository",
        )
    return {
        path.strip(): digest
        for digest, _, path in (line.partition("  ") for line in text.splitlines() if line)
    }


def _refuse(what: str, expected: str, action: str):
    raise NibbleError(ExitCode.VERIFY, what=what, expected=expected, action=action)

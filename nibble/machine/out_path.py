"""Files and folders that `--out` and similar options name: refused before a measurement."""

from __future__ import annotations

from pathlib import Path

from nibble.errors import ExitCode, NibbleError
from nibble.machine.disk import write_problem


def create(path: Path, option: str = "--out") -> None:
    """Make the empty file. Raises CONFIG where it exists or cannot be written."""
    try:
        path.open("x").close()
    except OSError as error:
        raise cannot_write(path, error.strerror, "a new file", "file", option) from None


def create_folder(path: Path, what: str, holding: str | None = None) -> None:
    """Make the folder of `--out`. `what` is written there; `holding` names the file that it must
    not have, None any file. Raises CONFIG.
    """
    problem, expected = write_problem(path), f"without {holding or 'files'}"
    if problem is None and holding is not None and (path / holding).exists():
        problem = f"it holds {holding}"
    if problem is None and holding is None and any(path.iterdir()):
        problem = "it is not empty"
    if problem is not None:
        expected = f"a folder that this user can write, {expected}"
        raise cannot_write(path, problem, expected, "folder", what=what)


def cannot_write(
    path: Path,
    problem: str | None,
    expected: str = "",
    kind: str = "file",
    option: str = "--out",
    what: str = "",
) -> NibbleError:
    """The error for a path that an option names."""
    said = f"{what} cannot be written to {path}" if what else f"{path} cannot be written"
    return NibbleError(
        ExitCode.CONFIG,
        what=f"{said} ({problem})",
        expected=expected,
        action=f"name another {kind} with {option}",
    )

"""Changes several files of a folder in one step, even if the process is killed.

A copy of the folder is made from hard links, the changed files are written into the copy, and one
system call exchanges the two folders: renameat2(2) with RENAME_EXCHANGE. No file of the old folder
is written to.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

AT_FDCWD = -100
RENAME_EXCHANGE = 2
# Python does not import a folder with a dot in its name as a package.
COPY_SUFFIX, OLD_SUFFIX = ".nibble-new", ".nibble-old"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock `folder` against other nibble processes, and recover from a killed one.

    Raises OSError.
    """
    handle = os.open(folder.parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        recover(folder)
        yield
    finally:
        os.close(handle)


def recover(folder: Path) -> None:
    """Clean up after a killed process: restore the folder if it was killed between the two renames
    of `_exchange`, and remove copies.
    """
    old = folder.with_name(folder.name + OLD_SUFFIX)
    copy = folder.with_name(folder.name + COPY_SUFFIX)
    if old.exists() and not folder.exists():
        old.rename(folder)
    for left in (old, copy):
        if left.exists():
            shutil.rmtree(left)


def replace_files(folder: Path, files: Mapping[str, bytes], edit: Callable[[Path], None]) -> None:
    """Change the files (path in `folder` -> content) and apply `edit` to the copy, in one step.

    Raises OSError.
    """
    copy = folder.with_name(folder.name + COPY_SUFFIX)
    try:
        shutil.copytree(folder, copy, symlinks=True, copy_function=_link)
        for name, content in files.items():
            _write(copy / name, content)
        edit(copy)
        _exchange(copy, folder)
    finally:
        shutil.rmtree(copy, ignore_errors=True)  # now the old folder, or the unused copy


def _link(source: str, target: str) -> None:
    """Make a hard link, or a copy if the file system does not support links (or not between its
    layers).
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP):
            raise
        shutil.copy2(source, target, follow_symlinks=False)


def _write(path: Path, content: bytes) -> None:
    """Replace a link by a new file with the same mode. The file it was linked to is unchanged."""
    mode = path.stat().st_mode & 0o7777 if path.exists() else 0o644
    fresh = path.with_name(path.name + ".nibble")
    with fresh.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.chmod(mode)
    fresh.replace(path)


def _exchange(copy: Path, folder: Path) -> None:
    """Exchange `copy` and `folder`."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = (os.fsencode(copy), os.fsencode(folder))
    if libc.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(number, os.strerror(number), str(folder))
    # For a file system without RENAME_EXCHANGE. Between the two renames the folder is missing, but
    # never half-changed; `recover` restores it.
    old = folder.with_name(folder.name + OLD_SUFFIX)
    folder.rename(old)
    copy.rename(folder)
    shutil.rmtree(old)

"""Changes several files of a folder as one step, even if the process is killed.

The folder is copied with hard links beside itself, the changed files are written into the copy, and
the two folders change places in one system call, renameat2(2) with RENAME_EXCHANGE. Nothing of the
old folder is ever written to.
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
# A dot in the name: Python never takes such a folder for a package.
COPY_SUFFIX, OLD_SUFFIX = ".nibble-new", ".nibble-old"


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock `folder` against other changes, and remove what a killed run left beside it.
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
    """After a kill: put the folder back where only the second of two renames was missing, and
    remove copies.
    """
    old, copy = (
        folder.with_name(folder.name + OLD_SUFFIX),
        folder.with_name(folder.name + COPY_SUFFIX),
    )
    if old.exists() and not folder.exists():
        old.rename(folder)
    for left in (old, copy):
        if left.exists():
            shutil.rmtree(left)


def replace_files(folder: Path, files: Mapping[str, bytes], edit: Callable[[Path], None]) -> None:
    """Give `folder` these contents (path within it -> bytes) and what `edit` does to the copy.
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
        shutil.rmtree(copy, ignore_errors=True)  # the old contents, or the copy that was not used


def _link(source: str, target: str) -> None:
    """A hard link; a copy where the file system has none (or forbids them across its layers)."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP):
            raise
        shutil.copy2(source, target, follow_symlinks=False)


def _write(path: Path, content: bytes) -> None:
    """A new file in place of the link: the file it was linked to keeps its bytes. Its mode is
    kept.
    """
    mode = path.stat().st_mode & 0o7777 if path.exists() else 0o644
    fresh = path.with_name(path.name + ".nibble")
    with fresh.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.chmod(mode)
    fresh.replace(path)


def _exchange(copy: Path, folder: Path) -> None:
    """`copy` and `folder` change places."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = (os.fsencode(copy), os.fsencode(folder))
    if libc.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(number, os.strerror(number), str(folder))
    # A file system without that call: between two renames the folder is missing, never mixed;
    # `recover` puts it back.
    old = folder.with_name(folder.name + OLD_SUFFIX)
    folder.rename(old)
    copy.rename(folder)
    shutil.rmtree(old)

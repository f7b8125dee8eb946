"""Folders that nibble and vLLM use: free space, writable, readable; each failure with its fix."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

from nibble.errors import ExitCode, NibbleError
from nibble.machine.paths import cache_dir


def gib(count: int) -> str:
    """A number of bytes in MiB or GiB, for messages."""
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"


def nearest_existing(path: Path) -> Path:
    """`path` or the closest ancestor of it that exists."""
    for candidate in (path, *path.parents):
        try:
            if candidate.exists():
                return candidate
        except OSError:  # an ancestor that this user cannot enter
            continue
    return Path("/")


def free_bytes(path: Path) -> int:
    """Bytes that this user can still write to the file system that holds (or will hold) `path`."""
    return shutil.disk_usage(nearest_existing(path)).free


def write_problem(path: Path) -> str | None:
    """Why nibble cannot create a file in the folder `path` (created if absent), or None.

    It writes a file: permission bits say nothing about root, read-only mounts or user namespaces.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".nibble-probe-"):
            return None
    except OSError as error:
        return error.strerror or type(error).__name__


def is_read_only(path: Path) -> bool:
    """Whether the file system of `path` is mounted read-only, as with `docker run --read-only`."""
    return bool(os.statvfs(nearest_existing(path)).f_flag & os.ST_RDONLY)


def is_noexec(path: Path) -> bool:
    """Whether the file system of `path` is mounted noexec, so that no compiled kernel loads from
    it.
    """
    return bool(os.statvfs(nearest_existing(path)).f_flag & os.ST_NOEXEC)


def secret_mode(folder: Path) -> int:
    """The mode of a secret file in `folder`: 0600, or 0640 in a folder that its group shares.

    The image's volume is such a folder (group 0, setgid, group-writable). Its writers can replace
    the secret and the compiled code in any case.
    """
    try:
        info = folder.stat()
    except OSError:
        return 0o600
    is_shared = (
        info.st_mode & stat.S_ISGID and info.st_mode & stat.S_IWGRP and info.st_gid == os.getegid()
    )
    return 0o640 if is_shared else 0o600


def secret_fix(path: Path) -> str:
    """How this user gets to read a secret file, as one action."""
    if not os.path.exists(path) and os.access(nearest_existing(path), os.X_OK):
        return "correct the path"
    group = os.getegid()
    return (
        f"run `chgrp {group} {path} && chmod g+r {path}` as root on the file's host, or"
        " start the container with `--user` of its owner"
    )


def not_writable(path: Path, problem: str, variable: str) -> NibbleError:
    """The error for a folder that nibble cannot write; `variable` moves it elsewhere."""
    return NibbleError(
        ExitCode.CONFIG,
        what=f"cannot write to {path} ({problem})",
        action=writable_fix(path, variable),
    )


def writable_fix(path: Path, variable: str) -> str:
    """How to make `path` writable for this user, as one action."""
    user, group = os.getuid(), os.getgid()
    owner = nearest_existing(path)
    if not owner.is_dir():
        return f"{owner} is a file; name a folder with {variable}"
    if is_read_only(owner):  # neither owner nor mode helps
        own = cache_dir()
        place = own if path.is_relative_to(own) else path
        return (
            f"mount a volume at it (docker run --volume nibble-cache:{place}; --tmpfs {place}:exec"
            f" keeps nothing for the next start), or name another folder with {variable}"
        )
    return (
        f"run `chown -R {user}:{group} {owner}`, or start the container with "
        f"`--user {owner.stat().st_uid}:0`, or name another folder with {variable}"
    )


def is_folder(path: Path) -> bool:
    """Whether it is a folder. Raises MODEL where this user cannot enter a folder on the way."""
    try:
        return path.is_dir()
    except PermissionError:
        raise not_readable(path) from None


def unreadable_file(folder: Path) -> Path | None:
    """The first file or folder under `folder` (links followed) that this user cannot read."""
    if not os.access(folder, os.R_OK | os.X_OK):
        return folder
    for parent, folders, files in os.walk(folder, followlinks=True):
        for name in sorted(folders):
            if not os.access(path := Path(parent, name), os.R_OK | os.X_OK):
                return path
        for name in sorted(files):
            if not os.access(path := Path(parent, name), os.R_OK):
                return path
    return None


def not_readable(path: Path) -> NibbleError:
    """The error for a model file that this user cannot read, or a dangling link."""
    if os.path.islink(path) and not os.path.exists(path) and not _hidden(path):
        what = f"{path} links to {os.readlink(path)}, which does not exist"
        action = "mount or copy the whole Hugging Face cache, not one model's folder"
        return NibbleError(ExitCode.MODEL, what=what, expected="the file itself", action=action)
    real = _blocking(path)
    what = f"uid {os.getuid()} cannot read {real}"
    on_the_way = real in Path(os.path.realpath(path)).parents
    mode = "a+x" if on_the_way else "-R a+rX" if real.is_dir() else "a+rX"
    return NibbleError(
        ExitCode.MODEL,
        what=what,
        action=f"run `chmod {mode} {real}` as its owner, or use `--user` of the owner",
    )


def _hidden(path: Path) -> bool:
    """Whether a link's target looks absent because this user cannot enter a folder on the way."""
    return not os.access(nearest_existing(Path(os.path.realpath(path))), os.X_OK)


def _blocking(path: Path) -> Path:
    """The file, or the folder on the way to it, whose permissions exclude this user."""
    real = Path(os.path.realpath(path))
    for parent in reversed(real.parents):
        if not os.access(parent, os.X_OK):
            return parent
    return real


def folder_bytes(folder: Path) -> int:
    """Bytes allocated under `folder`; each file counts once. 0 for an absent folder."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            try:
                info = os.lstat(os.path.join(parent, name))
            except OSError:
                continue
            if (key := (info.st_dev, info.st_ino)) not in seen:
                seen.add(key)
                total += info.st_blocks * 512
    return total

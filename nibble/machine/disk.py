"""Folders nibble and vLLM use: free space, writable, readable; each failure with the command
that fixes it.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

from nibble.errors import ExitCode, NibbleError
from nibble.machine.paths import cache_dir


def gib(count: int) -> str:
    """A number of bytes for people."""
    return f"{count / (1 << 30):.1f} GiB" if count >= 100 << 20 else f"{count / (1 << 20):.1f} MiB"


def nearest_existing(path: Path) -> Path:
    """`path` or the closest ancestor of it that exists."""
    for candidate in (path, *path.parents):
        try:
            if candidate.exists():
                return candidate
        except OSError:  # an ancestor we may not enter
            continue
    return Path("/")


def free_bytes(path: Path) -> int:
    """Bytes an unprivileged user may still write to the file system that holds (or will hold)
    `path`.
    """
    return shutil.disk_usage(nearest_existing(path)).free


def write_problem(path: Path) -> str | None:
    """Why no file can be made in the folder `path` (made if absent), or None.

    Really writes: permission bits say nothing about root, read-only mounts or user namespaces.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".nibble-probe-"):
            return None
    except OSError as error:
        return error.strerror or type(error).__name__


def is_read_only(path: Path) -> bool:
    """Whether the file system that holds (or will hold) `path` is mounted read-only, as
    everything is with --read-only.
    """
    return bool(os.statvfs(nearest_existing(path)).f_flag & os.ST_RDONLY)


def is_noexec(path: Path) -> bool:
    """Whether the file system that holds (or will hold) `path` runs no code: no compiled kernel
    can be loaded from it.
    """
    return bool(os.statvfs(nearest_existing(path)).f_flag & os.ST_NOEXEC)


def secret_mode(folder: Path) -> int:
    """The mode of a secret file in `folder`: its owner's alone, or readable for the folder's group
    where all users of the folder are in it, as in the image's volume (group 0, setgid,
    group-writable). Who may write there may replace the secret and the compiled code anyway.
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
    """How this user gets to read a secret file, in one sentence."""
    if not os.path.exists(path) and os.access(nearest_existing(path), os.X_OK):
        return "correct the path"
    group = os.getegid()
    return (
        f"run `chgrp {group} {path} && chmod g+r {path}` as root where the file comes from, or"
        " start the container with `--user` of its owner"
    )


def not_writable(path: Path, problem: str, variable: str) -> NibbleError:
    """The error for a folder that must be written and is not; `variable` moves it elsewhere."""
    return NibbleError(
        ExitCode.CONFIG,
        what=f"cannot write to {path} ({problem})",
        action=writable_fix(path, variable),
    )


def writable_fix(path: Path, variable: str) -> str:
    """How to make `path` writable for this user, in one sentence."""
    user, group = os.getuid(), os.getgid()
    owner = nearest_existing(path)
    if not owner.is_dir():
        return f"{owner} is a file; name a folder with {variable}"
    if is_read_only(owner):  # no owner and no mode helps there
        own = cache_dir()
        place = own if path.is_relative_to(own) else path
        return (
            f"mount a volume there (docker run --volume nibble-cache:{place}; --tmpfs {place}:exec"
            f" keeps nothing for the next start), or name another folder with {variable}"
        )
    return (
        f"run `chown -R {user}:{group} {owner}`, or start the container with "
        f"`--user {owner.stat().st_uid}:0`, or name another folder with {variable}"
    )


def is_folder(path: Path) -> bool:
    """Whether it is one. Raises MODEL where a folder on the way to it is closed to this user."""
    try:
        return path.is_dir()
    except PermissionError:
        raise not_readable(path) from None


def unreadable_file(folder: Path) -> Path | None:
    """The first file or folder under `folder` (links followed) that this user may not read, or
    None.
    """
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
    """The error for a model file this user may not read; a dangling link is named as such."""
    if os.path.islink(path) and not os.path.exists(path) and not _hidden(path):
        what = f"{path} links to {os.readlink(path)}, which is not here"
        action = "mount or copy the whole Hugging Face cache, not one model's folder of it"
        return NibbleError(ExitCode.MODEL, what=what, expected="the file itself", action=action)
    real = _blocking(path)
    what = f"{real} is not readable for uid {os.getuid()}"
    on_the_way = real in Path(os.path.realpath(path)).parents
    mode = "a+x" if on_the_way else "-R a+rX" if real.is_dir() else "a+rX"
    return NibbleError(
        ExitCode.MODEL,
        what=what,
        action=f"run `chmod {mode} {real}` as its owner, or use `--user` of the owner",
    )


def _hidden(path: Path) -> bool:
    """Whether the target of a link only looks absent because a folder on the way is closed to
    us.
    """
    return not os.access(nearest_existing(Path(os.path.realpath(path))), os.X_OK)


def _blocking(path: Path) -> Path:
    """The file, or the folder on the way to it, whose permissions keep us out."""
    real = Path(os.path.realpath(path))
    for parent in reversed(real.parents):
        if not os.access(parent, os.X_OK):
            return parent
    return real


def folder_bytes(folder: Path) -> int:
    """Bytes allocated under `folder`, each file once however many links lead to it; 0 when
    absent.
    """
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

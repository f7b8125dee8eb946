"""The entries of compiled code on disk: opened by a server, recorded when ready, verified, pruned.

Nothing here stops a start: nibble drops what is damaged, and the start compiles it again. What
cannot be written is not recorded.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nibble.machine.disk import folder_bytes
from nibble.plan.compile_cache import CacheKey, CachePlan
from nibble.serve.compile_record import KEY, LOCK, RECORD, damage, write_json, write_record

DROPPED = ".dropped-"


@dataclass(frozen=True)
class Entry:
    """One entry as it lies on disk. `parts` are those of its key; times are seconds since 1970."""

    folder: Path
    kind: str
    parts: Mapping[str, str]
    size_bytes: int
    last_used_s: float
    is_recorded: bool
    is_used: bool

    def to_json(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {
            **vars(self),
            "folder": str(self.folder),
            "name": self.folder.name,
            "parts": dict(self.parts),
        }


class Use:
    """The entries of a plan while a server runs: locked against prune, recorded on request. `say`
    gets warnings.
    """

    def __init__(self, caches: CachePlan, say: Callable[[str], None]) -> None:
        self._caches, self._say = caches, say
        self._locks: list[int] = []
        self._was_ready = False
        self._recording = threading.Lock()  # a server may be stopped the moment it is ready

    def open(self) -> None:
        """Verify the entries, drop damaged ones, create missing ones, and lock all of them."""
        for key in self._caches.keys:
            folder = self._caches.root / key.name
            with self._or_warn(folder):
                if problem := next(damage(folder), ""):
                    self._say(
                        _dropped(key.name, problem) if drop(folder) else _kept(key.name, problem)
                    )
                _make(folder, key)
                self._hold(folder)
        with self._or_warn(self._caches.root):
            self._share_model_inspection()

    def record(self) -> None:
        """The server is ready, so its files work: record each with size and sha256."""
        self._was_ready = True
        for key in self._caches.keys:
            folder = self._caches.root / key.name
            with self._recording, self._or_warn(folder):
                if folder.is_dir():
                    write_record(folder)

    def close(self) -> None:
        """Record what was compiled since the server was ready, and release the entries."""
        if self._was_ready:
            self.record()
        for descriptor in self._locks:
            os.close(descriptor)
        self._locks.clear()

    def _hold(self, folder: Path) -> None:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
        self._locks.append(descriptor)
        with contextlib.suppress(BlockingIOError):  # another process drops it now
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.utime(folder / KEY)

    def _share_model_inspection(self) -> None:
        """Share vLLM's inspection of model classes among entries: it depends on the class's source,
        not on flags.
        """
        if not self._caches.keys:
            return
        shared = self._caches.folder("kernels") / "modelinfos"
        link = self._caches.folder("graphs") / "vllm" / "modelinfos"
        shared.mkdir(exist_ok=True)
        link.parent.mkdir(exist_ok=True)
        if not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(shared, link.parent))

    @contextlib.contextmanager
    def _or_warn(self, folder: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._say(
                f"warning: the cache entry {folder} cannot be updated ({error.strerror or error})"
            )


def _dropped(name: str, problem: str) -> str:
    return (
        f"the cache entry {name} is damaged ({problem}); nibble dropped it, and this start"
        f" compiles it"
        " again"
    )


def _kept(name: str, problem: str) -> str:
    return (
        f"warning: the cache entry {name} is damaged ({problem}) and stays: another server or user"
        " holds it"
    )


def _make(folder: Path, key: CacheKey) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / KEY).exists():
        write_json(folder / KEY, {"kind": key.kind, "parts": dict(key.parts)})


# --- what is there ---


def entries(root: Path) -> list[Entry]:
    """All entries below `root`, the most recently used first; the kind of a folder without a
    readable key is unknown.
    """
    found: list[Entry] = []
    for folder in _folders(root):
        with contextlib.suppress(FileNotFoundError):  # dropped meanwhile
            found.append(_entry(folder))
    return sorted(found, key=lambda entry: -entry.last_used_s)


def _folders(root: Path) -> list[Path]:
    try:
        return [
            path for path in root.iterdir() if path.is_dir() and not path.name.startswith(DROPPED)
        ]
    except OSError:
        return []


def _entry(folder: Path) -> Entry:
    try:
        key = json.loads((folder / KEY).read_text())
        kind, parts = (
            str(key["kind"]),
            {str(name): str(value) for name, value in key["parts"].items()},
        )
        last_used_s = (folder / KEY).stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        kind, parts = "unknown", {}
        last_used_s = folder.stat().st_mtime
    recorded = os.path.exists(folder / RECORD)
    return Entry(folder, kind, parts, folder_bytes(folder), last_used_s, recorded, _is_held(folder))


def _is_held(folder: Path) -> bool:
    """Whether a server (of this machine) holds the entry."""
    descriptor = _exclusive(folder)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


def _exclusive(folder: Path) -> int | None:
    """The entry's exclusive lock, or None if another process holds it."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # no server has ever held it
        return os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:  # another user's: it may be held
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


# --- pruned ---


def drop(folder: Path) -> bool:
    """Remove an entry; False if a server holds it. It disappears for other processes at once, even
    if the removal fails later.
    """
    descriptor = _exclusive(folder)
    if descriptor is None:
        return False
    try:
        away = folder.with_name(f"{DROPPED}{folder.name}-{os.getpid()}-{time.time_ns()}")
        folder.rename(away)
    finally:
        os.close(descriptor)
    shutil.rmtree(away, ignore_errors=True)
    return True


def sweep(root: Path) -> None:
    """Remove what an interrupted `drop` left."""
    with contextlib.suppress(OSError):
        for left in root.glob(f"{DROPPED}*"):
            shutil.rmtree(left, ignore_errors=True)


def to_prune(
    found: Sequence[Entry],
    now_s: float,
    older_than_s: float | None = None,
    max_bytes: int | None = None,
    build: str | None = None,
) -> list[Entry]:
    """The entries that a prune removes, the longest unused first; entries in use stay. Pure.

    It selects entries older than `older_than_s`, of a build other than `build`, and then as many as
    `max_bytes` requires.
    """
    oldest_first = sorted(
        (entry for entry in found if not entry.is_used), key=lambda entry: entry.last_used_s
    )
    gone = [
        entry
        for entry in oldest_first
        if (older_than_s is not None and now_s - entry.last_used_s > older_than_s)
        or (build is not None and entry.parts.get("build") != build)
    ]
    if max_bytes is None:
        return gone
    left = sum(entry.size_bytes for entry in found) - sum(entry.size_bytes for entry in gone)
    for entry in oldest_first:
        if left <= max_bytes:
            break
        if entry not in gone:
            gone.append(entry)
            left -= entry.size_bytes
    return gone

"""The entries of compiled code on disk: opened by a server, recorded when ready, verified, pruned.

Nothing here stops a start: nibble drops what is damaged, and the start compiles it again. What
cannot be written is not recorded.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nibble.machine.disk import folder_bytes
from nibble.plan.compile_cache import CacheKey, CachePlan

KEY, RECORD, LOCK = "entry.json", "files.json", "lock"
DROPPED = ".dropped-"
READ_BYTES = 4 << 20
# Rewritten while a server runs or by the next one, or kept by the driver;
# of JSON among them only that it can be read is certain.
REWRITTEN = (
    "*/modelinfos/*",
    "*/startup_plan/*",
    "*/flashinfer_autotune_cache/*",
    "*/gpu_p2p_access_cache*",
    "*.autotune.json",
    "*.best_config",
    "*.log",
    "*.lock",
    "*/.ninja_log",
    "*/.ninja_deps",
    "cuda/*",
    "*/__pycache__/*",
)
# On the way into the cache; gone or renamed at any moment.
PASSING = ("*.tmp", "*.tmp.*", "*/tmp.*", "*/.tmp*", "*.incomplete")
# What a damaged record may raise when it is read.
BROKEN = (ValueError, LookupError, TypeError, AttributeError, OverflowError, IsADirectoryError)


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
        """Record what was compiled since, and release the entries."""
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
        """vLLM inspects a model class in a separate process, keyed by its source: the same
        whatever the flags.
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
        _write_json(folder / KEY, {"kind": key.kind, "parts": dict(key.parts)})


def _write_json(path: Path, data: Any) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    scratch.write_text(json.dumps(data, indent=1) + "\n")
    scratch.replace(path)


# --- what is there ---


def entries(root: Path) -> list[Entry]:
    """All entries below `root`, the last used first; a folder without a readable key is listed as
    unknown.
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
    """The entry's exclusive lock, or None where another process holds it."""
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


# --- recorded, verified ---


def write_record(folder: Path) -> int:
    """Note the entry's files; how many. Only what changed since the last record is read again."""
    try:
        known = _read_record(folder) or {}
    except BROKEN:  # damaged meanwhile: made anew
        known = {}
    now = {path: _stamp(folder / path) for path in _files(folder)}
    changed = [path for path, stamp in now.items() if known.get(path, [None, None])[:2] != stamp]
    with ThreadPoolExecutor(4) as pool:
        hashes = dict(
            zip(changed, pool.map(lambda path: _sha256(folder / path), changed), strict=True)
        )
    files = {path: [*stamp, hashes.get(path) or known[path][2]] for path, stamp in now.items()}
    _write_json(folder / RECORD, {"files": {path: row for path, row in files.items() if row[2]}})
    return len(files)


def damage(folder: Path, sizes_only: bool = False) -> Iterator[str]:
    """What differs from the record: missing, truncated or (without `sizes_only`) changed files. An
    entry without a record shows none.
    """
    if not folder.is_dir():
        return
    try:
        known = _read_record(folder)
    except BROKEN:
        yield f"{RECORD} cannot be read"
        return
    except PermissionError as error:
        yield f"{RECORD} cannot be read ({error.strerror})"
        return
    if known is None:
        return
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(
            lambda item: _difference(folder, item[0], item[1], sizes_only), known.items()
        )
        yield from filter(None, found)


def _difference(folder: Path, path: str, row: Sequence[Any], sizes_only: bool) -> str:
    size, _, digest = row
    file = folder / path
    try:
        if _matches(path, REWRITTEN):
            return _unreadable(file)
        if (found := file.stat().st_size) != size:
            return f"{path} has {found} bytes instead of {size}"
        same = sizes_only or _sha256(file) == digest
        return "" if same else f"the sha256 of {path} differs from the recorded one"
    except FileNotFoundError:
        return "" if _matches(path, REWRITTEN) else f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"


def _unreadable(file: Path) -> str:
    if file.suffix != ".json":
        return ""
    try:
        json.loads(file.read_text())
    except ValueError:
        return f"{file.name} is not JSON"
    return ""


def _read_record(folder: Path) -> dict[str, list[Any]] | None:
    """Path -> [bytes, mtime in ns, sha256]; None where there is no record. Raises ValueError &
    co. for a damaged one.
    """
    try:
        text = (folder / RECORD).read_text()
    except FileNotFoundError:
        return None
    files = json.loads(text)["files"]
    return {str(path): [int(row[0]), int(row[1]), str(row[2])] for path, row in files.items()}


def _files(folder: Path) -> Iterator[str]:
    """The entry's files by relative path, without our own, links and what only passes through."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.relpath(os.path.join(parent, name), folder)
            is_ours = path in (KEY, RECORD, LOCK) or os.path.islink(os.path.join(parent, name))
            if not is_ours and not _matches(path, PASSING):
                yield path


def _matches(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _stamp(path: Path) -> list[int]:
    try:
        info = path.stat()
    except OSError:  # gone meanwhile
        return [-1, -1]
    return [info.st_size, info.st_mtime_ns]


def _sha256(path: Path) -> str | None:
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(READ_BYTES):
                digest.update(chunk)
    except FileNotFoundError:
        return None
    return digest.hexdigest()


# --- pruned ---


def drop(folder: Path) -> bool:
    """Remove an entry; False where a server holds it. It disappears for others at once,
    even if the removal fails later.
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
    """What a prune removes, the longest unused first; entries in use stay. Pure.

    Older than `older_than_s`; of another build than `build`; and as many of the rest as `max_bytes`
    requires.
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

"""The record of a compiled entry's files: written when a server is ready, compared at a start."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

KEY, RECORD, LOCK = "entry.json", "files.json", "lock"
READ_BYTES = 4 << 20
# Rewritten while a server runs or by the next one, or kept by the driver;
# of JSON among them only that it can be read is certain.
REWRITTEN = (
    "*/modelinfos/*", "*/startup_plan/*", "*/flashinfer_autotune_cache/*",
    "*/gpu_p2p_access_cache*", "*.autotune.json", "*.best_config", "*.log", "*.lock",
    "*/.ninja_log", "*/.ninja_deps", "cuda/*", "*/__pycache__/*",
)  # fmt: skip
# On the way into the cache; gone or renamed at any moment.
PASSING = ("*.tmp", "*.tmp.*", "*/tmp.*", "*/.tmp*", "*.incomplete")
# What a damaged record may raise when it is read.
BROKEN = (ValueError, LookupError, TypeError, AttributeError, OverflowError, IsADirectoryError)


def write_record(folder: Path) -> int:
    """Record the entry's files; returns their number. Only files that changed since the last record
    are read again.
    """
    try:
        known = _read_record(folder) or {}
    except BROKEN:  # damaged meanwhile: written again
        known = {}
    now = {path: _stamp(folder / path) for path in _files(folder)}
    changed = [path for path, stamp in now.items() if known.get(path, [None, None])[:2] != stamp]
    with ThreadPoolExecutor(4) as pool:
        hashes = dict(
            zip(changed, pool.map(lambda path: _sha256(folder / path), changed), strict=True)
        )
    files = {path: [*stamp, hashes.get(path) or known[path][2]] for path, stamp in now.items()}
    write_json(folder / RECORD, {"files": {path: row for path, row in files.items() if row[2]}})
    return len(files)


def damage(folder: Path, sizes_only: bool = False) -> Iterator[str]:
    """Differences from the record: missing, truncated or (without `sizes_only`) changed files. An
    entry without a record has none.
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
    """Path -> [bytes, mtime in ns, sha256]; None without a record. Raises an error of BROKEN for a
    damaged one.
    """
    try:
        text = (folder / RECORD).read_text()
    except FileNotFoundError:
        return None
    files = json.loads(text)["files"]
    return {str(path): [int(row[0]), int(row[1]), str(row[2])] for path, row in files.items()}


def _files(folder: Path) -> Iterator[str]:
    """The entry's files by relative path, without nibble's files, links and temporary files."""
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
    except OSError:  # removed meanwhile
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


def write_json(path: Path, data: Any) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    scratch.write_text(json.dumps(data, indent=1) + "\n")
    scratch.replace(path)

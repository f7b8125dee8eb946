"""Files that a conversion reads and writes without leaving them in Linux's cache."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from nibble.checkpoint.convert import files
from nibble.checkpoint.convert.files import _Out, read_into, uncached
from nibble.checkpoint.gguf.tensors import StoredBlocks

PARTS = [bytes([number % 251]) * (number % 7) for number in range(3 * files.MAX_VIEWS)]


def written(path: Path, parts: list[Any]) -> bytes:
    with path.open("wb", buffering=0) as file:
        out = _Out(file)
        for part in parts:
            out.add(part)
        out.flush()
    return path.read_bytes()


def test_many_and_empty_parts(tmp_path: Path) -> None:
    assert written(tmp_path / "file", PARTS) == b"".join(PARTS)


def test_a_call_that_writes_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def some(descriptor: int, views: list[memoryview], at: int, _flags: int = 0) -> int:
        return os.pwrite(descriptor, b"".join(views)[:1000], at)

    monkeypatch.setattr(os, "pwritev", some)
    assert written(tmp_path / "file", PARTS) == b"".join(PARTS)


def test_parts_are_written_before_they_are_many_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "WRITE_BYTES", 100)
    with (tmp_path / "file").open("wb", buffering=0) as file:
        out = _Out(file)
        out.add(bytes(60))
        assert os.fstat(file.fileno()).st_size == 0
        out.add(bytes(60))
        assert os.fstat(file.fileno()).st_size == out.at == 120


def test_where_linux_cannot_do_without_its_cache(tmp_path: Path) -> None:
    """An older Linux, or a file system without it, refuses the flag."""
    calls = []

    def older(descriptor: int, views: list[memoryview], at: int, flags: int = 0) -> int:
        calls.append(flags)
        if flags:
            raise OSError(errno.EOPNOTSUPP, "")
        return os.pwritev(descriptor, views, at)

    with (tmp_path / "file").open("wb", buffering=0) as file:
        assert uncached(older, file, [memoryview(b"abc")], 2) == 3
    assert (tmp_path / "file").read_bytes() == b"\0\0abc"
    assert calls == [files._DONTCACHE, 0]


def test_another_error_is_the_callers(tmp_path: Path) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="full"):
        uncached(full, file, [], 0)


def test_a_part_of_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(200)))
    data = bytearray(50)
    read_into(StoredBlocks("BF16", 50, tmp_path / "file", 100), data)
    assert data == bytes(range(100, 150))

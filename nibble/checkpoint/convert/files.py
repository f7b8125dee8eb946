"""Reads and writes safetensors with a few tensors in memory at a time."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nibble.checkpoint.gguf.tensors import StoredBlocks
from nibble.checkpoint.headers import DTYPE_BITS, TensorInfo
from nibble.errors import ExitCode, NibbleError

WRITE_BYTES = 8 << 20
MAX_VIEWS = 1024  # Linux's limit for a call
ALIGNMENT = 8  # safetensors pads its header with spaces so that tensors begin at a multiple of it

# Writable bytes: torch views them without a warning.
Buffer = bytearray | memoryview
# `read(first, count)` gives bytes of one tensor.
Read = Callable[[int, int], Buffer]
# The tensors that one tensor becomes, and their bytes in the same order, or iterators over these.
Outputs = Callable[[TensorInfo], list[TensorInfo]]
Data = Callable[[TensorInfo, Read], Iterable[Any]]
# Gives the reader of a tensor: of a folder, or of a GGUF file.
Values = Callable[[TensorInfo], Read]
# The bytes of what each tensor of a file becomes, in the file's order.
Make = Callable[[Sequence[TensorInfo]], Iterable[Iterable[Any]]]


# How a matrix is stored, or None for a tensor that only its `Values` read.
BlocksOf = Callable[[TensorInfo], StoredBlocks | None]


def tensor(name: str, dtype: str, shape: Sequence[int]) -> TensorInfo:
    """A tensor that no file holds yet."""
    return TensorInfo(name, dtype, tuple(shape), math.prod(shape) * DTYPE_BITS[dtype] // 8)


def folder_values(folder: Path) -> Values:
    """The stored bytes of the tensors of a folder."""

    def of(info: TensorInfo) -> Read:
        def read(first: int, count: int) -> Buffer:
            data = bytearray(count)
            with (folder / info.file).open("rb") as file:
                file.seek(info.offset + first)
                file.readinto(data)
            return data

        return read

    return of


def folder_blocks(folder: Path) -> BlocksOf:
    """The stored bytes of the BF16 tensors of a folder."""

    def of(info: TensorInfo) -> StoredBlocks | None:
        if info.dtype != "BF16":
            return None
        return StoredBlocks("BF16", info.nbytes, folder / info.file, info.offset)

    return of


def read_into(stored: StoredBlocks, to: Any) -> None:
    """Fill the array `to`. Raises MODEL where the file ends before."""
    path, view, at = stored.path, memoryview(to), stored.offset
    with path.open("rb", buffering=0) as file:
        while view:
            count = uncached(os.preadv, file, [view], at)
            if not count:
                raise NibbleError(
                    ExitCode.MODEL,
                    what=f"{path} ends in mid-tensor",
                    expected="a complete file that nothing changes meanwhile",
                    action="download the file again",
                )
            view, at = view[count:], at + count


# RWF_DONTCACHE of Linux 6.14, which Python 3.11 does not name.
_DONTCACHE = 0x80


def uncached(transfer: Callable[..., int], file: Any, views: list[memoryview], at: int) -> int:
    """preadv or pwritev that leaves no pages in Linux's cache, where Linux can do that: filling new
    pages may take longer than to convert what is in them.
    """
    try:
        return transfer(file.fileno(), views, at, _DONTCACHE)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
    return transfer(file.fileno(), views, at)


def index_names(folder: Path) -> list[str]:
    """The indexes that a folder has."""
    return sorted(path.name for path in folder.glob("*.safetensors.index.json"))


def in_files(tensors: Mapping[str, TensorInfo]) -> dict[str, list[TensorInfo]]:
    """The tensors of each file in their order there."""
    files: dict[str, list[TensorInfo]] = {}
    for info in sorted(tensors.values(), key=lambda info: (info.file, info.offset)):
        files.setdefault(info.file, []).append(info)
    return files


def one_by_one(values: Values, data: Data) -> Make:
    """Computes a file's new tensors from one stored tensor after another."""
    return lambda inside: (data(info, values(info)) for info in inside)


def rewrite(
    dest: Path,
    tensors: Mapping[str, TensorInfo],
    outputs: Outputs,
    make: Make,
    indexes: Iterable[str],
) -> None:
    """Write what each file of `tensors` becomes under its name in `dest`, and `indexes`.

    Raises NO_FIT, before it writes, where the disk lacks the space.
    """
    files = in_files(tensors)
    planned = {file: [outputs(info) for info in inside] for file, inside in files.items()}
    placed = {
        target.name: (file, target.nbytes)
        for file, groups in planned.items()
        for group in groups
        for target in group
    }
    total_bytes = sum(nbytes for _, nbytes in placed.values())
    need_space(dest, total_bytes)
    for file, inside in files.items():
        (dest / file).parent.mkdir(parents=True, exist_ok=True)
        _write_file(dest / file, planned[file], make(inside))
    for name in indexes:
        content = {
            "metadata": {"total_size": total_bytes},
            "weight_map": {tensor: placed[tensor][0] for tensor in sorted(placed)},
        }
        (dest / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def need_space(dest: Path, needed_bytes: int) -> None:
    """Raise NO_FIT where the disk of `dest` has less space than that."""
    free_bytes = shutil.disk_usage(dest).free
    if free_bytes < needed_bytes:
        raise NibbleError(
            ExitCode.NO_FIT,
            what=f"the converted model has {needed_bytes / 1e9:.2f} GB,"
            f" the disk of {dest.parent} has {free_bytes / 1e9:.2f} GB free",
            action="free space on its disk, or name another folder",
        )


def _write_file(
    dest: Path,
    planned: list[list[TensorInfo]],
    made: Iterable[Iterable[Any]],
) -> None:
    with dest.open("wb", buffering=0) as file:
        out = _Out(file)
        out.add(header(info for group in planned for info in group))
        for group, parts in zip(planned, made, strict=True):
            for target, part in zip(group, parts, strict=True):
                end = out.at + target.nbytes
                for piece in part if isinstance(part, Iterator) else (part,):
                    out.add(piece)
                assert out.at == end, target
            out.flush()  # the memory of its parts is used again


class _Out:
    """A file that is written in large pieces."""

    def __init__(self, file: Any) -> None:
        self._file, self._views, self._written = file, list[memoryview](), 0
        self.at = 0

    def add(self, part: Any) -> None:
        self._views.append(memoryview(part).cast("B"))
        self.at += len(self._views[-1])
        if self.at - self._written >= WRITE_BYTES:
            self.flush()

    def flush(self) -> None:
        views = self._views
        while views:
            count = uncached(os.pwritev, self._file, views[:MAX_VIEWS], self._written)
            self._written += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if views:
                views[0] = views[0][count:]


def header(tensors: Iterable[TensorInfo]) -> bytes:
    """The first bytes of a safetensors file that holds `tensors` in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for info in tensors:
        end = begin + info.nbytes
        entries[info.name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text

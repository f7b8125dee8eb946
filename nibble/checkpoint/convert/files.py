"""Reads and writes safetensors with one tensor in memory at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from nibble.checkpoint.headers import DTYPE_BITS, TensorInfo

ALIGNMENT = 8  # safetensors pads its header with spaces so that tensors begin at a multiple of it

# `read(first, count)` gives bytes of one tensor.
Read = Callable[[int, int], bytearray]
# The tensors that one tensor becomes, and their bytes in the same order.
Outputs = Callable[[TensorInfo], list[TensorInfo]]
Data = Callable[[TensorInfo, Read], Iterable[Any]]


def tensor(name: str, dtype: str, shape: Sequence[int]) -> TensorInfo:
    """A tensor that no file holds yet."""
    return TensorInfo(name, dtype, tuple(shape), math.prod(shape) * DTYPE_BITS[dtype] // 8)


def rewrite(
    source: Path, dest: Path, tensors: Mapping[str, TensorInfo], outputs: Outputs, data: Data
) -> None:
    """Write each safetensors file of `source` under its name in `dest`, and the index if any."""
    files: dict[str, list[TensorInfo]] = {}
    for info in sorted(tensors.values(), key=lambda info: (info.file, info.offset)):
        files.setdefault(info.file, []).append(info)
    placed: dict[str, str] = {}
    total_bytes = 0
    for file, inside in files.items():
        (dest / file).parent.mkdir(parents=True, exist_ok=True)
        written = _rewrite_file(source / file, dest / file, inside, outputs, data)
        placed |= {info.name: file for info in written}
        total_bytes += sum(info.nbytes for info in written)
    for index in source.glob("*.safetensors.index.json"):
        content = {
            "metadata": {"total_size": total_bytes},
            "weight_map": dict(sorted(placed.items())),
        }
        (dest / index.name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _rewrite_file(
    source: Path, dest: Path, inside: list[TensorInfo], outputs: Outputs, data: Data
) -> list[TensorInfo]:
    planned = [outputs(info) for info in inside]
    written = [info for group in planned for info in group]
    with source.open("rb") as file, dest.open("wb") as out:
        out.write(header(written))
        for info, group in zip(inside, planned, strict=True):
            for target, part in zip(group, data(info, reader(file, info)), strict=True):
                count = out.write(part)
                assert count == target.nbytes, (target, count)
    return written


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


def reader(file: BinaryIO, info: TensorInfo) -> Read:
    """A function that reads `info` from its file, as writable bytes, which torch views without a
    warning.
    """

    def read(first: int, count: int) -> bytearray:
        data = bytearray(count)
        file.seek(info.offset + first)
        file.readinto(data)  # pyright: ignore
        return data

    return read

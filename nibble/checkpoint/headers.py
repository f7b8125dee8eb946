"""Headers of safetensors files: names, types and shapes of tensors from the first bytes of a file.

The format (safetensors 0.8): u64 little-endian length N, N bytes of JSON, then the tensors without
holes. This module rejects what the loader would reject, before a server starts.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from nibble.errors import ExitCode, NibbleError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # safetensors 0.8 refuses more

# Bits of an element; F4 and F6 are packed, their shapes count elements.
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


class TensorInfo(NamedTuple):
    """One tensor as its header states it: safetensors dtype, shape in elements, bytes in the file.

    `file` is the file's path within the checkpoint, `offset` the byte in it at which the tensor
    begins.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str = ""
    offset: int = 0

    @property
    def elements(self) -> int:
        """Number of elements by shape; a packed U8 element may hold several weights."""
        return math.prod(self.shape)


def header_length(file: str, first_bytes: bytes, file_bytes: int) -> int:
    """N of `file`, whose size is `file_bytes`, from its first 8 bytes. Raises MODEL for an
    impossible length.
    """
    if file_bytes < LENGTH_BYTES or len(first_bytes) < LENGTH_BYTES:
        raise corrupt(file, f"it has {file_bytes} bytes", "at least the 8 bytes of a header length")
    (length,) = struct.unpack("<Q", first_bytes[:LENGTH_BYTES])
    if length > MAX_HEADER_BYTES:
        raise corrupt(
            file,
            f"its header length is {length} bytes",
            f"at most {MAX_HEADER_BYTES} (no safetensors file?)",
        )
    if LENGTH_BYTES + length > file_bytes:
        needed = LENGTH_BYTES + length
        raise corrupt(file, f"it has {file_bytes} bytes", f"at least {needed} bytes for its header")
    return length


def parse_header(
    file: str, header: bytes, file_bytes: int, path: str = ""
) -> dict[str, TensorInfo]:
    """The tensors of `file` from its N header bytes; `path` becomes their `TensorInfo.file`.

    Raises MODEL, naming `file`, for anything inconsistent.
    """
    try:
        data = json.loads(header.decode())  # UTF-8 alone: json would guess UTF-16 too
    except (ValueError, RecursionError):
        raise corrupt(file, "its header is not JSON", "a safetensors header") from None
    if not isinstance(data, dict):
        raise corrupt(file, "its header is not a JSON object", "a safetensors header")
    data.pop("__metadata__", None)
    spans: list[tuple[int, int, str]] = []
    tensors: dict[str, TensorInfo] = {}
    data_start = LENGTH_BYTES + len(header)
    for name, entry in data.items():
        dtype, shape, begin, end = _tensor(file, name, entry)
        tensors[name] = TensorInfo(name, dtype, shape, end - begin, path, data_start + begin)
        spans.append((begin, end, name))
    _check_spans(file, spans, file_bytes - data_start)
    return tensors


def _tensor(file: str, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, first byte, byte after the last) of one entry."""
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        numbers = (*shape, begin, end)
        valid = (
            set(map(type, numbers)) == {int}
            and min(numbers) >= 0
            and begin <= end
            and isinstance(dtype, str)
        )
    except (TypeError, KeyError, ValueError):
        valid, dtype, shape, begin, end = False, "", (), 0, 0
    if not valid:
        raise corrupt(
            file, f"its header entry for {name} is malformed", "dtype, shape and data_offsets"
        )
    if dtype not in DTYPE_BITS:
        raise corrupt(file, f"{name} has the unknown dtype {dtype!r}", "a safetensors dtype")
    needed = -(-math.prod(shape) * DTYPE_BITS[dtype] // 8)
    if needed != end - begin:
        what = f"{name} of dtype {dtype} and shape {list(shape)} has {end - begin} bytes"
        raise corrupt(file, what, f"{needed} bytes")
    return dtype, shape, begin, end


def _check_spans(file: str, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    """Tensors must follow each other without hole or overlap and fill the file."""
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            raise corrupt(file, f"{name} begins at byte {begin} of the data", f"byte {position}")
        position = end
    if position != data_bytes:
        how = "truncated" if data_bytes < position else "longer than its header says"
        raise corrupt(file, f"it is {how}: {data_bytes} bytes of tensors", f"{position} bytes")


def corrupt(file: str, what: str, expected: str) -> NibbleError:
    """The error for a damaged safetensors file."""
    action = "download the file again (`nibble pull` checks every hash)"
    return NibbleError(
        ExitCode.MODEL, what=f"{file} is corrupt: {what}", expected=expected, action=action
    )

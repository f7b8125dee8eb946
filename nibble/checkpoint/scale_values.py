"""Reads the values of scale tensors without the weights: finds damaged ones, and returns fp32
scales by name.
"""

from __future__ import annotations

import math
import os
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nibble.checkpoint.headers import TensorInfo
from nibble.checkpoint.nvfp4 import Nvfp4Weight, Problem, gather
from nibble.checkpoint.source import FolderSource, Source
from nibble.errors import ExitCode, NibbleError
from nibble.machine.disk import not_readable

NAN = 0x7F
FINITE = bytes(range(NAN))  # E4M3 bytes that are finite and not negative; 0x00 is a block of zeros
CHUNK_BYTES = 16 << 20
MAX_GAP_BYTES = 64 << 10  # scalars nearer than this to each other are read at once
MAX_HUB_REQUESTS = 64
LEAST_F32, LARGEST_F32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # normal numbers


@dataclass(frozen=True)
class ScaleCheck:
    """Problems found in the scales, and the tensors and bytes that were read."""

    problems: tuple[Problem, ...]
    tensors: int
    nbytes: int


class TensorFiles:
    """Safetensors files of a folder, each opened once; a context manager. Reading raises MODEL."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, int] = {}

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def read(self, tensor: TensorInfo, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of `tensor`."""
        path = self.folder / tensor.file
        try:
            if tensor.file not in self._open:
                self._open[tensor.file] = os.open(path, os.O_RDONLY)
            data = os.pread(self._open[tensor.file], stop - start, tensor.offset + start)
        except PermissionError:
            raise not_readable(path) from None
        except OSError as error:
            what = f"{path} cannot be read ({error.strerror})"
            raise NibbleError(
                ExitCode.MODEL, what=what, action="check the disk, or download it again"
            ) from None
        if len(data) < stop - start:
            what = f"{path} ends within {tensor.name}"
            raise NibbleError(
                ExitCode.MODEL,
                what=what,
                expected="the whole tensor",
                action="download the file again",
            )
        return data

    def chunks(self, tensor: TensorInfo) -> Iterator[bytes]:
        """The bytes of `tensor`, some MiB at a time."""
        for start in range(0, tensor.nbytes, CHUNK_BYTES):
            yield self.read(tensor, start, min(start + CHUNK_BYTES, tensor.nbytes))


def check_values(folder: Path, weights: Iterable[Nvfp4Weight]) -> ScaleCheck:
    """Read every scale of `weights` in `folder`: block scales finite and not negative, fp32 ones
    finite and above 0.
    """
    scales: list[tuple[TensorInfo, bool]] = []
    divisors: set[str] = set()
    for weight in weights:
        found = (weight.scale, weight.global_scale, weight.input_scale)
        scales += [(tensor, weight.is_draft) for tensor in found if tensor is not None]
        if weight.layout == "compressed-tensors":
            divisors |= {tensor.name for tensor in found[1:] if tensor is not None}
    scales.sort(key=lambda entry: (entry[0].file, entry[0].offset))
    problems = []
    with TensorFiles(folder) as files:
        for tensor, is_draft in scales:
            if damage := _damage(tensor, files.chunks(tensor), tensor.name in divisors):
                kind, what, expected = damage
                problems.append(Problem.of(kind, tensor, what, expected, is_draft))
    return ScaleCheck(gather(problems), len(scales), sum(tensor.nbytes for tensor, _ in scales))


def _damage(
    tensor: TensorInfo, chunks: Iterator[bytes], is_divisor: bool
) -> tuple[str, str, str] | None:
    """(kind, what, expected) of the first invalid value."""
    start = 0
    for data in chunks:
        if tensor.dtype == "F8_E4M3" and (found := first_damaged(data)):
            index, byte = found
            value = "NaN" if byte & NAN == NAN else "negative"
            what = f"has a {value} scale, byte 0x{byte:02x} at element {start + index}"
            return "block scale", what, "finite scales, none of them negative"
        if tensor.dtype == "F32":
            bad = [value for value in floats(data) if not (math.isfinite(value) and value > 0)]
            if bad:
                return "fp32 scale", f"is {bad[0]}", "a finite number above 0"
            bad = [
                value
                for value in floats(data)
                if is_divisor and not LEAST_F32 <= 1 / value <= LARGEST_F32
            ]
            if bad:
                what = f"is a divisor of {bad[0]:.4g}, whose reciprocal is not a normal float32"
                return (
                    "divisor",
                    what,
                    f"a number from {1 / LARGEST_F32:.3g} to {1 / LEAST_F32:.3g}",
                )
        start += len(data)
    return None


def first_damaged(data: bytes) -> tuple[int, int] | None:
    """(index, byte) of the first E4M3 scale that is NaN or negative."""
    if data.isascii() and b"\x7f" not in data:  # 8 GB/s where `translate` does 2
        return None
    byte = data.translate(None, FINITE)[0]
    return data.index(byte), byte


def marlin_flushes(folder: Path, weights: Iterable[Nvfp4Weight]) -> int:
    """The number of weights whose smallest block scales Marlin would set to 0.

    It multiplies all by the largest power of two that keeps them within 448 and drops what is then
    below 2^-6 (vllm 0.32 marlin_utils_fp4.py): 13 to 14 octaves below the largest. Fused layers,
    which are scaled as one, are not considered.
    """
    count = 0
    with TensorFiles(folder) as files:
        for weight in weights:
            if weight.scale is not None and weight.scale.dtype == "F8_E4M3":
                count += _has_flushed(list(files.chunks(weight.scale)))
    return count


def _has_flushed(chunks: list[bytes]) -> bool:
    largest = next((b for b in range(NAN - 1, 0, -1) if any(b in data for data in chunks)), 0)
    if not largest:
        return False
    shift = math.floor(math.log2(448 / e4m3_value(largest)))
    lost = (byte for byte in range(1, 8) if e4m3_value(byte) * 2.0**shift < 2.0**-6)
    return any(byte in data for byte in lost for data in chunks)


def floats(data: bytes) -> tuple[float, ...]:
    """Little-endian F32."""
    return struct.unpack(f"<{len(data) // 4}f", data)


def numbers(data: bytes, dtype: str) -> tuple[float, ...]:
    """Little-endian F32, BF16 or F16; empty for other types."""
    if dtype == "BF16":
        return floats(b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2)))
    if dtype == "F16":
        return struct.unpack(f"<{len(data) // 2}e", data)
    return floats(data) if dtype == "F32" else ()


def largest_scale(chunks: Iterable[bytes]) -> float:
    """The largest E4M3 value among finite, non-negative scales."""
    stored = list(chunks)
    return next(
        (e4m3_value(b) for b in range(NAN - 1, 0, -1) if any(b in data for data in stored)), 0.0
    )


def read_floats(
    source: Source, tensors: Iterable[TensorInfo]
) -> Mapping[str, tuple[float, ...]] | None:
    """The values of F32 `tensors` by name; None where they need too many requests to the Hub."""
    runs = list(_runs(tensors))
    if not isinstance(source, FolderSource) and len(runs) > MAX_HUB_REQUESTS:
        return None
    found: dict[str, tuple[float, ...]] = {}
    for run in runs:
        first, last = run[0], run[-1]
        data = source.read(first.file, first.offset, last.offset + last.nbytes)
        for tensor in run:
            start = tensor.offset - first.offset
            found[tensor.name] = floats(data[start : start + tensor.nbytes])
    return found


def _runs(tensors: Iterable[TensorInfo]) -> Iterator[list[TensorInfo]]:
    """Groups of F32 tensors that lie close together and are read at once: writers store small ones
    side by side.
    """
    by_file: defaultdict[str, list[TensorInfo]] = defaultdict(list)
    for tensor in tensors:
        if tensor.dtype == "F32":
            by_file[tensor.file].append(tensor)
    for listed in by_file.values():
        listed.sort(key=lambda tensor: tensor.offset)
        run = [listed[0]]
        for tensor in listed[1:]:
            if tensor.offset - run[-1].offset - run[-1].nbytes > MAX_GAP_BYTES:
                yield run
                run = []
            run.append(tensor)
        yield run


def e4m3_value(byte: int) -> float:
    """The value of an E4M3 byte below 0x7F."""
    exponent, mantissa = byte >> 3, byte & 7
    return (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9

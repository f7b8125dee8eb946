"""The GPU code in a compiled module, read from its ELF file without CUDA: which object has code for
which architecture.

A fat binary is a header (magic 0xBA55ED50, version, header size, size of all entries) and entries:
kind (1 PTX, 2 machine code), header size, size of the code, SM number at byte 28, flags at byte 40.
The code may be compressed (vLLM's is, since CUDA 13); the headers never are. nvcc leaves two local
symbols in each object: FILE, whose name has the source file's in it, and fatbinData, its place in
section .nv_fatbin. So one sees which source has which code, as long as the file was not stripped.
The layout is not documented: checked against cuobjdump 13.5 and against objects of known flags
(tests/patches/test_binaries.py).
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nibble.errors import ExitCode, NibbleError

MAGIC = struct.pack("<I", 0xBA55ED50)
PTX, MACHINE_CODE = 1, 2
ARCHITECTURE_SPECIFIC, FAMILY_SPECIFIC = 0x100000, 0x200000
NEEDED, FILE_SYMBOL = 1, 4  # DT_NEEDED, STT_FILE


@dataclass(frozen=True, order=True)
class Code:
    """One entry: PTX or machine code for one architecture, such as 120f."""

    sm: int  # 80, 100, 120: capability 8.0, 10.0, 12.0
    suffix: str = ""  # a: this architecture only; f: this one and later ones of its family
    is_ptx: bool = False

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU can load it: machine code of its major version up to its minor one; PTX
        of any earlier one.
        """
        own = divmod(self.sm, 10)
        if self.suffix == "a":
            return capability == own
        if self.is_ptx and not self.suffix:
            return capability >= own
        return capability[0] == own[0] and capability[1] >= own[1]

    def __str__(self) -> str:
        return f"{'PTX ' if self.is_ptx else ''}{self.sm}{self.suffix}"


@dataclass(frozen=True)
class GpuObject:
    """What nvcc made of one source file. `name` is that file's, without .cu; empty in a stripped
    module.
    """

    name: str
    codes: tuple[Code, ...]


@dataclass(frozen=True)
class _Section:
    name: str
    address: int
    offset: int
    size: int


def gpu_objects(path: Path) -> tuple[GpuObject, ...]:
    """Every fat binary of an ELF file, in its order; none where it has no GPU code. Raises
    NibbleError (exit 6).
    """
    with _elf(path) as data:
        sections = _sections(data)
        code = sections.get(".nv_fatbin")
        if code is None:
            return ()
        names = dict(_names(data, sections))
        return tuple(
            GpuObject(
                names.get(offset - code.offset + code.address, ""),
                tuple(_entries(data, offset, end)),
            )
            for offset, end in _containers(data, code)
        )


def needed_libraries(path: Path) -> tuple[str, ...]:
    """The shared libraries that a module asks for by name. Raises NibbleError (exit 6)."""
    with _elf(path) as data:
        sections = _sections(data)
        dynamic, strings = sections.get(".dynamic"), sections.get(".dynstr")
        if dynamic is None or strings is None:
            return ()
        entries = struct.iter_unpack("<QQ", data[dynamic.offset : dynamic.offset + dynamic.size])
        return tuple(_text(data, strings.offset + value) for tag, value in entries if tag == NEEDED)


class _elf:
    """A mapped file whose damage, met while it is read, is one clear error."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> mmap.mmap:
        try:
            with self.path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise self._unreadable(str(error)) from None
        if self.data[:6] != b"\x7fELF\x02\x01":
            self.data.close()
            raise self._unreadable("not a 64-bit little-endian ELF file")
        return self.data

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.data.close()
        if isinstance(error, struct.error | IndexError | ValueError):
            raise self._unreadable(f"damaged ({error})") from None

    def _unreadable(self, why: str) -> NibbleError:
        return NibbleError(
            ExitCode.VERIFY,
            what=f"{self.path} cannot be read: {why}",
            expected="a compiled module of vLLM",
            action="install vLLM again",
        )


def _sections(data: mmap.mmap) -> dict[str, _Section]:
    (table,) = struct.unpack_from("<Q", data, 40)
    width, count, names_index = struct.unpack_from("<HHH", data, 58)
    headers = [
        struct.unpack_from("<IIQQQQ", data, table + number * width) for number in range(count)
    ]
    names = headers[names_index][4]
    found = (_Section(_text(data, names + header[0]), *header[3:]) for header in headers)
    return {section.name: section for section in found}


def _text(data: mmap.mmap, offset: int) -> str:
    return data[offset : data.find(b"\0", offset)].decode()


def _containers(data: mmap.mmap, section: _Section) -> Iterator[tuple[int, int]]:
    """Begin and end of each fat binary of the section."""
    end = section.offset + section.size
    offset = data.find(MAGIC, section.offset, end)
    while offset >= 0:
        header, size = struct.unpack_from("<HQ", data, offset + 6)
        yield offset, offset + header + size
        offset = data.find(MAGIC, offset + header + size, end)


def _entries(data: mmap.mmap, offset: int, end: int) -> Iterator[Code]:
    (header,) = struct.unpack_from("<H", data, offset + 6)
    offset += header
    while offset < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", data, offset)
        if kind not in (PTX, MACHINE_CODE) or header < 48:
            raise ValueError(f"entry of kind {kind} in a fat binary")
        (sm,), (flags,) = (
            struct.unpack_from("<I", data, offset + 28),
            struct.unpack_from("<Q", data, offset + 40),
        )
        suffix = "a" if flags & ARCHITECTURE_SPECIFIC else "f" if flags & FAMILY_SPECIFIC else ""
        yield Code(sm, suffix, kind == PTX)
        offset += header + size


def _names(data: mmap.mmap, sections: dict[str, _Section]) -> Iterator[tuple[int, str]]:
    """Address of each fat binary -> the source file it comes from."""
    symbols, strings = sections.get(".symtab"), sections.get(".strtab")
    if symbols is None or strings is None:
        return
    source = 0
    table = data[symbols.offset : symbols.offset + symbols.size]
    for name, info, _, _, value, _ in struct.iter_unpack("<IBBHQQ", table):
        if info & 15 == FILE_SYMBOL:
            source = strings.offset + name
        elif data[strings.offset + name : strings.offset + name + 11] == b"fatbinData\0":
            yield value, _source_name(_text(data, source))


def _source_name(file: str) -> str:
    """tmpxft_00001d71_00000000-6_nvfp4_quant_kernels.compute_120.cudafe1.cpp ->
    nvfp4_quant_kernels
    """
    return re.sub(r"^tmpxft_\w+-\d+_|(\.compute_\w+)?\.cudafe\d+\.cpp$", "", file)

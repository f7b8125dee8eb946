"""Reads the GPU code of a compiled module from its ELF file, without CUDA.

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

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import Section, SymbolTableSection

from nibble.errors import ExitCode, NibbleError

MAGIC = struct.pack("<I", 0xBA55ED50)
PTX, MACHINE_CODE = 1, 2
ARCHITECTURE_SPECIFIC, FAMILY_SPECIFIC = 0x100000, 0x200000
FILE_SYMBOL = 4  # STT_FILE
_SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym: name, info, other, section, value, size
_DAMAGE = (  # what pyelftools and struct raise over damaged files
    ELFError, struct.error, ArithmeticError, AttributeError, LookupError, TypeError, ValueError,
)  # fmt: skip


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
    """The GPU code that nvcc made of one source file. `name` is the file's, without .cu; empty in a
    stripped module.
    """

    name: str
    codes: tuple[Code, ...]


def gpu_objects(path: Path) -> tuple[GpuObject, ...]:
    """Every fat binary of an ELF file, in its order; empty without GPU code. Raises NibbleError
    (exit 6).
    """
    with _Module(path) as module:
        code = module.elf.get_section_by_name(".nv_fatbin")
        if code is None:
            return ()
        names = dict(_names(module))
        begin, address = code["sh_offset"], code["sh_addr"]
        return tuple(
            GpuObject(
                names.get(offset - begin + address, ""),
                tuple(_entries(module.data, offset, end)),
            )
            for offset, end in _containers(module.data, code)
        )


def needed_libraries(path: Path) -> tuple[str, ...]:
    """The shared libraries that a module needs, by name. Raises NibbleError (exit 6)."""
    with _Module(path) as module:
        dynamic = module.elf.get_section_by_name(".dynamic")
        if not isinstance(dynamic, DynamicSection):
            return ()
        # pyelftools sets the attribute while it reads the tag.
        return tuple(tag.needed for tag in dynamic.iter_tags("DT_NEEDED"))  # type: ignore[attr]


class _Module:
    """A mapped file; damage found while it is read is one clear error."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> _Module:
        try:
            with self.path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise self._unreadable(str(error)) from None
        if self.data[:6] != b"\x7fELF\x02\x01":
            self.data.close()
            raise self._unreadable("not a 64-bit little-endian ELF file")
        try:
            self.elf = ELFFile(self.data)  # type: ignore[arg-type]  # a map reads as a file
        except _DAMAGE as error:
            self.__exit__(type(error), error, None)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.data.close()
        if isinstance(error, _DAMAGE):
            raise self._unreadable(f"damaged ({error})") from None

    def _unreadable(self, why: str) -> NibbleError:
        return NibbleError(
            ExitCode.VERIFY,
            what=f"{self.path} cannot be read: {why}",
            expected="a compiled module of vLLM",
            action="install vLLM again",
        )


def _containers(data: mmap.mmap, section: Section) -> Iterator[tuple[int, int]]:
    """Begin and end of each fat binary of the section."""
    end = section["sh_offset"] + section["sh_size"]
    offset = data.find(MAGIC, section["sh_offset"], end)
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


def _names(module: _Module) -> Iterator[tuple[int, str]]:
    """Address of each fat binary -> the source file it comes from.

    The table is unpacked in one pass: pyelftools takes 1.5 s for the 26,681 symbols of
    _C_stable_libtorch, one at a time, and this 0.04 s.
    """
    symbols = module.elf.get_section_by_name(".symtab")
    if not isinstance(symbols, SymbolTableSection):
        return
    strings = symbols.stringtable["sh_offset"]
    source = 0
    for name, info, _, _, value, _ in _SYMBOL.iter_unpack(symbols.data()):
        if info & 15 == FILE_SYMBOL:
            source = name
        elif module.data[strings + name : strings + name + 11] == b"fatbinData\0":
            yield value, _source_name(symbols.stringtable.get_string(source))


def _source_name(file: str) -> str:
    """tmpxft_00001d71_00000000-6_nvfp4_quant_kernels.compute_120.cudafe1.cpp ->
    nvfp4_quant_kernels
    """
    return re.sub(r"^tmpxft_\w+-\d+_|(\.compute_\w+)?\.cudafe\d+\.cpp$", "", file)

"""Opens a GGUF file: its metadata and its tensors, which stay on the disk until they are read.

The library `gguf` reads the format. This module refuses what is not a whole language model before
anything of it is converted.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nibble.errors import ExitCode, NibbleError
from nibble.machine.disk import not_readable

MAGIC = b"GGUF"
SUFFIX = ".gguf"
VERSIONS = (2, 3)  # version 1 counted in 32 bits, which gguf 0.19 does not read
# Names that llama.cpp's gguf-split gives: NAME-00001-of-00003.gguf
PART = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
MAX_PARTS = 1000


@dataclass(frozen=True)
class GgufFile:
    """A GGUF model: `metadata` by key, and the library's tensor objects by name.

    `path` is the file that was named; a model in several files has all their tensors, each in the
    file that `places` has.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Any]
    places: Mapping[str, Path]

    @property
    def architecture(self) -> str:
        """The name by which its other keys begin, such as "llama"."""
        return str(self.metadata["general.architecture"])


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file that is or claims to be GGUF."""
    if not path.is_file():
        return False
    if path.name.lower().endswith(SUFFIX):
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def open_gguf(path: Path) -> GgufFile:
    """The model in `path` and in its further parts.

    Raises MODEL for a file that cannot be read or is damaged, CONFIG for one that is not a language
    model.
    """
    metadata, tensors = _read(path)
    places = dict.fromkeys(tensors, path)
    count = metadata.get("split.count", 1)
    for part in _other_parts(path, metadata, count):
        more, found = _read(part)
        if more.get("split.count") != count:
            raise _damaged(part, f"it is not a part of {path.name}")
        tensors |= found
        places |= dict.fromkeys(found, part)
    expected = metadata.get("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        raise _damaged(path, f"its parts hold {len(tensors)} tensors, not {expected}")
    _check_kind(path, metadata)
    return GgufFile(path, metadata, tensors, places)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and tensors of one file."""
    _check_start(path)
    try:
        reader = _reader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except PermissionError:
        raise not_readable(path) from None
    # What the library raises for bytes that are not the format's: it indexes and reshapes.
    except (ValueError, LookupError, OSError, ArithmeticError, TypeError, MemoryError) as error:
        why = " ".join(str(error).split())
        if unknown := re.search(r"\b(\d+)\)? is not a valid GGMLQuantizationType", why):
            raise NibbleError(
                ExitCode.CONFIG,
                what=f"{path} has tensors of the unknown type {unknown[1]}",
                expected="a type that the library gguf 0.19 reads, such as Q8_0 or Q4_K",
                action="convert another GGUF file of this model",
            ) from None
        raise _damaged(path, f"it ends or changes in mid-tensor ({why[:200]})") from None
    return metadata, tensors


def _reader(path: Path) -> Any:
    """The library's reader, on a plain view of the mapped file: numpy makes a slice of a memmap
    object ten times as slowly, and a vocabulary takes a million.
    """
    import numpy
    from gguf import GGUFReader

    class Reader(GGUFReader):
        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            self._plain = numpy.asarray(mapped)

    return Reader(path)


def _check_start(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except PermissionError:
        raise not_readable(path) from None
    except OSError as error:
        raise NibbleError(
            ExitCode.MODEL,
            what=f"{path} cannot be read ({error.strerror})",
            action="check the disk",
        ) from None
    if start[:4] != MAGIC:
        raise NibbleError(
            ExitCode.MODEL,
            what=f"{path} is not a GGUF file: it begins with {start[:4].hex(' ') or 'nothing'}",
            expected=f"{MAGIC.hex(' ')} ({MAGIC.decode()})",
            action="download the file again",
        )
    (version,) = struct.unpack("<I", start[4:8].ljust(4, b"\0"))
    if version not in VERSIONS:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{path} is GGUF version {version}"
            if version < 1 << 16
            else f"{path} is a big-endian GGUF file",
            expected="version 2 or 3, little-endian",
            action="convert another GGUF file of this model",
        )


def _damaged(path: Path, why: str) -> NibbleError:
    return NibbleError(
        ExitCode.MODEL,
        what=f"{path} is truncated or damaged: {why}",
        expected="a complete GGUF file",
        action="download the file again",
    )


def _other_parts(path: Path, metadata: Mapping[str, Any], count: Any) -> list[Path]:
    """The other files of a split model; `path` must be the first. Raises USAGE and MODEL."""
    if not isinstance(count, int) or not 1 <= count <= MAX_PARTS:
        raise _damaged(path, f"split.count is {count}")
    if count == 1:
        return []
    named = PART.match(path.name)
    if named is None or int(named["count"]) != count:
        raise NibbleError(
            ExitCode.MODEL,
            what=f"{path.name} is one of {count} parts, but its name does not say which",
            expected=f"NAME-00001-of-{count:05}.gguf",
            action="name the files as they were published",
        )
    parts = [
        path.with_name(f"{named['stem']}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    ]
    if metadata.get("split.no") != 0:
        raise NibbleError(
            ExitCode.USAGE,
            what=f"{path.name} is part {int(named['number'])} of {count}",
            expected="the first part, which describes the model",
            action=f"name {parts[0].name}",
        )
    if missing := [part.name for part in parts if not part.is_file()]:
        raise NibbleError(
            ExitCode.MODEL,
            what=f"{missing[0]} is missing",
            expected=f"{count} parts beside each other",
            action="download the missing parts",
        )
    return parts[1:]


def _check_kind(path: Path, metadata: Mapping[str, Any]) -> None:
    """Raise CONFIG for a GGUF file that holds something other than a language model."""
    kind, architecture = metadata.get("general.type", "model"), metadata.get("general.architecture")
    what = None
    if kind == "mmproj" or architecture == "clip":
        what = f"{path} is the vision part (mmproj) of a model"
    elif kind == "adapter" or "adapter.type" in metadata:
        what = f"{path} is a LoRA adapter"
    elif kind not in ("model", "finetune", "merge"):
        what = f"{path} holds no model but: {kind}"
    elif not isinstance(architecture, str):
        what = f"{path} does not name its architecture"
    if what:
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="the GGUF file of a whole language model",
            action="name the file that holds the model",
        )

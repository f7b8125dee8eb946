"""Rows of the bad-input table about `nibble convert`, and GGUF files, which no server reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.bad_input.case import Case, Place, Row, row, serve

FILE = "{tmp}/model.gguf"
CONVERT = ("convert", FILE, "{tmp}/converted", "--to", "nvfp4")


def gguf_file(
    architecture: str = "llama", change: Callable[[Any], Any] = lambda _: None, cut: int = 0
) -> Callable[[Place], Any]:
    """Write a GGUF file with one tensor to {tmp}/model.gguf; `change` adds keys."""

    def write(place: Place) -> None:
        import numpy
        from gguf import GGUFWriter

        path = place.tmp / "model.gguf"
        writer = GGUFWriter(path, architecture)
        change(writer)
        writer.add_tensor("token_embd.weight", numpy.zeros((64, 64), numpy.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - cut)

    return write


def bytes_file(data: bytes) -> Callable[[Place], Any]:
    """Write {tmp}/model.gguf."""
    return lambda place: Path(place.tmp, "model.gguf").write_bytes(data)


def gguf_rows() -> list[Row]:
    """GGUF files that are served, and those that are not whole language models."""
    return [
        row(
            "gguf-served",
            "a GGUF file as the model of `serve`, `plan` or `inspect`",
            5,
            "…/model.gguf is a GGUF file; expected a model in Hugging Face format; run `nibble"
            " convert …/model.gguf FOLDER --to nvfp4` and name FOLDER",
            serve(FILE, prepare=gguf_file()),
            Case(("plan", FILE), prepare=gguf_file()),
            Case(("inspect", FILE), prepare=gguf_file()),
        ),
        row(
            "gguf-truncated",
            "`convert` of a truncated GGUF file",
            4,
            "…/model.gguf is truncated or damaged: …; expected a complete GGUF file; …",
            Case(CONVERT, prepare=gguf_file(cut=100)),
        ),
        row(
            "gguf-magic",
            "`convert` of a file named .gguf that is not one",
            4,
            "…/model.gguf is not a GGUF file: it begins with 3c 68 74 6d; …",
            Case(CONVERT, prepare=bytes_file(b"<html>Not found</html>")),
        ),
        row(
            "gguf-version",
            "`convert` of GGUF version 1",
            5,
            "…/model.gguf is GGUF version 1; expected version 2 or 3, little-endian; …",
            Case(CONVERT, prepare=bytes_file(b"GGUF\1\0\0\0" + bytes(64))),
        ),
        row(
            "gguf-architecture",
            "`convert` of a GGUF file of an architecture that nibble does not know",
            5,
            "…/model.gguf has the architecture 'mamba'; expected one of llama, …",
            Case(CONVERT, prepare=gguf_file("mamba")),
        ),
        row(
            "gguf-vision",
            "`convert` of the vision part of a model (mmproj)",
            5,
            "…/model.gguf is the vision part (mmproj) of a model; …",
            Case(CONVERT, prepare=gguf_file("clip", lambda writer: writer.add_type("mmproj"))),
        ),
        row(
            "gguf-adapter",
            "`convert` of a LoRA adapter in GGUF",
            5,
            "…/model.gguf is a LoRA adapter; …",
            Case(CONVERT, prepare=gguf_file(change=lambda writer: writer.add_type("adapter"))),
        ),
        row(
            "gguf-part",
            "`convert` of a part of a split GGUF model under another name",
            4,
            "model.gguf is one of 3 parts, but its name does not say which; …",
            Case(CONVERT, prepare=gguf_file(change=lambda w: w.add_uint16("split.count", 3))),
        ),
        row(
            "gguf-layout",
            "`convert` of a GGUF file to another layout than nvfp4",
            5,
            "…/model.gguf is a GGUF file, which --to modelopt does not read; …",
            Case(("convert", FILE, "{tmp}/converted", "--to", "modelopt"), prepare=gguf_file()),
        ),
        row(
            "cache-type",
            "`convert --kv-cache int8`",
            2,
            "--kv-cache int8; expected fp8",
            Case((*CONVERT, "--kv-cache", "int8"), prepare=gguf_file()),
        ),
        row(
            "kept-share",
            "`convert --keep-sensitive -1`",
            2,
            "--keep-sensitive -1.0; expected a number from 0 to 300, …",
            Case((*CONVERT, "--keep-sensitive", "-1"), prepare=gguf_file()),
        ),
    ]

"""Rows about `nibble reference`."""

from __future__ import annotations

from tests.support.bad_input.case import (
    Case,
    Row,
    row,
)


def reference_rows() -> list[Row]:
    """Words of `nibble reference`."""
    return [
        row(
            "reference-dtype",
            "`nibble reference` with an unknown type of numbers",
            2,
            "--dtype is 'float16'; expected float32 or float64; correct --dtype",
            Case(("reference", "{model}", "--dtype", "float16")),
        ),
        row(
            "reference-out",
            "`nibble reference --out` where no file can be written",
            5,
            "/proc/none/r.json cannot be written (No such file or directory); name another file"
            " with --out",
            Case(("reference", "{model}", "--out", "/proc/none/r.json")),
        ),
        row(
            "reference-device",
            "`nibble reference` on an unknown device",
            2,
            "--device is 'tpu'; expected cpu or cuda; correct --device",
            Case(("reference", "{model}", "--device", "tpu")),
        ),
        row(
            "reference-activations",
            "`nibble reference` for unknown activations",
            2,
            "--activations is 'int8'; expected fp4 or bf16; correct --activations",
            Case(("reference", "{model}", "--activations", "int8")),
        ),
        row(
            "reference-model",
            "`nibble reference` of a folder that is not there",
            4,
            "…/none is not a folder; expected a folder with config.json; correct MODEL",
            Case(("reference", "{tmp}/none")),
        ),
    ]

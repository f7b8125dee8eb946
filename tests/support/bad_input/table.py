"""The table of bad input: source of docs/bad-input.md and its tests.

`python -m tests.support.bad_input` writes the documentation. In messages `…` stands for what varies
(a path, a version); everything else is compared word for word. `{tmp}`, `{model}`, `{used_port}` in
words and variables stand for a temporary folder, a valid tiny model, and a port on which a process
listens.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.bad_input.bench import bench_rows
from tests.support.bad_input.bundle import bundle_rows
from tests.support.bad_input.case import Ignored, Row
from tests.support.bad_input.cluster import cluster_rows
from tests.support.bad_input.engine import engine_rows
from tests.support.bad_input.gguf import gguf_rows
from tests.support.bad_input.machine import machine_rows
from tests.support.bad_input.models import model_rows
from tests.support.bad_input.nvfp4 import nvfp4_rows
from tests.support.bad_input.nvfp4_options import option_rows, put_right
from tests.support.bad_input.patches import patch_rows
from tests.support.bad_input.reference import reference_rows
from tests.support.bad_input.variables import IGNORED_VARIABLES, name_rows, secret_rows, value_rows
from tests.support.bad_input.words import owned_rows, word_rows
from tests.support.paths import ROOT

DOCUMENT = ROOT / "docs" / "bad-input.md"
IGNORED = (*IGNORED_VARIABLES, *put_right())


def all_rows() -> list[Row]:
    """The whole table, in its order."""
    groups = (
        model_rows,
        nvfp4_rows,
        gguf_rows,
        option_rows,
        engine_rows,
        word_rows,
        owned_rows,
        name_rows,
        secret_rows,
        machine_rows,
        cluster_rows,
        value_rows,
        patch_rows,
        reference_rows,
        bench_rows,
        bundle_rows,
    )
    return [entry for group in groups for entry in group()]


def document(rows: Sequence[Row], ignored: Sequence[Ignored]) -> str:
    """docs/bad-input.md."""
    lines = [
        "# Bad input",
        "",
        "What nibble refuses, with which exit code and message. Every row has a test that runs the",
        "command: it ends with that code, prints exactly one line `nibble: error: MESSAGE` and no",
        "traceback, and starts no process. `…` stands for what varies.",
        "",
        "Made by `python -m tests.support.bad_input`; change it there.",
        "",
        "| input | exit code | message |",
        "|---|---|---|",
    ]
    lines += [f"| {_cell(entry.input)} | {entry.code} | {_cell(entry.message)} |" for entry in rows]
    lines += ["", "## Ignored or put right, with a notice", "", "| input | notice |", "|---|---|"]
    lines += [f"| {_cell(entry.input)} | {_cell(entry.notice)} |" for entry in ignored]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")

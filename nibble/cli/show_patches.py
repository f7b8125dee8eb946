"""The tables of `nibble patches` and `nibble doctor`: each defect of vLLM and its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from nibble.cli.tables import wide_console
from nibble.engine.patching.status import row_order


def show_patches(tree: Any, lines: Sequence[Any]) -> None:
    """The two tables of docs/patches.md for one tree."""
    console = wide_console()
    colours = {"applied": "green", "needed": "red", "failed": "red", "not fixed": "yellow"}
    for title, live in (
        ("defects that older projects patched", False),
        ("defects of vLLM 0.32.0", True),
    ):
        table = Table(
            title=title, title_justify="left", title_style="bold", box=None, pad_edge=False
        )
        for heading in ("id", "state", "defect", "nibble's answer", "seen"):
            table.add_column(heading, overflow="fold", no_wrap=heading in ("id", "state"))
        for line in lines:
            if (row_order(line.id)[0] == 1) is live:
                colour = colours.get(line.word, "default")
                cells = [escape(text) for text in (line.title, line.fix or "-", line.detail)]
                table.add_row(line.id, f"[{colour}]{line.word}[/]", *cells)
        console.print(table)
    counted = Counter(line.word for line in lines)
    console.print(
        f"{tree.root} ({tree.layout}, vllm {tree.version}): "
        + ", ".join(f"{n} {w}" for w, n in counted.items())
    )

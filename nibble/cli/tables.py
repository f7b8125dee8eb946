"""Tables for the terminal, shared by the verbs."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table


def wide_console() -> Console:
    """A console as wide as the terminal; 160 columns where the output is a file or a pipe."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def plain_table(*headings: str) -> Table:
    """A table without lines; its first column never wraps."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading == headings[0])
    return table

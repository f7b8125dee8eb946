"""Tables for the terminal, as every verb prints them."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table


def wide_console() -> Console:
    """As wide as the terminal; wide enough for tables where the output goes to a file or a pipe."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def plain_table(*headings: str) -> Table:
    """A table without lines whose first column stays whole."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading == headings[0])
    return table

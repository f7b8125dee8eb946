"""Prints the report of `nibble doctor`."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from nibble.cli.doctor.report import Report
from nibble.cli.show_patches import show_patches


def show_report(report: Report) -> None:
    """Print one line for each check, then the table of patches."""
    console = Console(highlight=False, soft_wrap=True)
    colours = {"ok": "green", "warning": "yellow", "fail": "red"}
    for check in report.checks:
        fix = f"; {check.fix}" if check.fix else ""
        console.print(
            f"[{colours[check.status]}]{check.status:7}[/] {check.name}: {escape(check.what + fix)}"
        )
    if report.patches:
        show_patches(report.tree, report.patches)

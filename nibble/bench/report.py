"""A result as plain data and as Markdown. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nibble.bench.compare import Change, Ratio
from nibble.bench.files import FORMAT
from nibble.bench.result import Measured

HEADINGS = (
    "prompt", "output", "streams", "server", "tokens/s", "first token ms (p99)",
    "between tokens ms (p99)", "errors", "J/token", "spread",
)  # fmt: skip
WORDS = {
    "tokens_per_s": "tokens/s",
    "ttft_ms": "time to first token",
    "per_token_ms": "time between tokens",
}


@dataclass(frozen=True)
class Report:
    """What was measured so far. `ended`: why it is not complete, or nothing. `against` and
    `compared` name the other server and the other result, or nothing.
    """

    about: Mapping[str, Any]
    cells: Sequence[Measured]
    ended: str = ""
    against: str = ""
    ratios: Sequence[Ratio] = ()
    compared: str = ""
    changes: Sequence[Change] = ()

    def to_json(self) -> dict[str, Any]:
        """What results.json holds."""
        return {
            "format": FORMAT,
            **self.about,
            "complete": not self.ended,
            "ended": self.ended,
            "cells": [one.to_json() for one in self.cells],
            "ratios": [{**vars(one), "cell": one.cell.to_json()} for one in self.ratios],
            "compared_with": self.compared,
            "changes": [one.to_json() for one in self.changes],
        }

    @property
    def has_energy(self) -> bool:
        return any(one.joules_per_token is not None for one in self.cells)


def number(value: float) -> str:
    """Three digits that count."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def row(one: Measured) -> tuple[str, ...]:
    """A cell in the order of HEADINGS."""
    cell, energy = one.cell, one.joules_per_token

    def pair(figure: str, p99: str) -> str:
        return f"{number(one.median(figure))} ({number(one.median(p99))})"

    return (
        *(str(value) for value in (cell.prompt_tokens, cell.output_tokens, cell.concurrency)),
        one.side,
        number(one.median("tokens_per_s")),
        pair("ttft_ms", "ttft_p99_ms"),
        pair("per_token_ms", "between_p99_ms"),
        f"{one.errors} of {one.requests}" if one.errors else "0",
        "" if energy is None else number(energy),
        f"{100 * one.spread('tokens_per_s'):.1f} %" if len(one.rounds) > 1 else "",
    )


def ratio_lines(ratios: Sequence[Ratio], against: str) -> Iterator[str]:
    """A line for each cell and figure, with the range of the rounds."""
    for one in ratios:
        yield (
            f"{one.cell}: {WORDS[one.figure]}: {one.median:.2f}× as fast as {against}"
            f" ({one.lowest:.2f} to {one.highest:.2f})"
        )


def change_lines(changes: Sequence[Change]) -> Iterator[str]:
    """What changed beyond noise, or one line that says that nothing did."""
    different = [one for one in changes if one.verdict != "same"]
    for one in different:
        yield (
            f"{one.cell}: {WORDS[one.figure]} is {one.verdict}: {number(one.new)} instead of"
            f" {number(one.old)} ({100 * one.gain:+.0f} %, noise {100 * one.noise:.0f} %)"
        )
    if changes and not different:
        cells = len({one.cell for one in changes})
        yield f"no change beyond noise in {cells} {'cell' if cells == 1 else 'cells'}"


def reasons(cells: Sequence[Measured]) -> list[str]:
    """Different errors of all rounds."""
    rounds = [turn for one in cells for turn in one.rounds]
    return list(dict.fromkeys(text for turn in rounds for text in turn.reasons))


def markdown(report: Report, has_plot: bool) -> str:
    """The page of a result."""
    about, machine = report.about, report.about["machine"]
    place = machine.get("remote") or ", ".join(
        [*machine["gpus"], f"{machine['cpu']} ({machine['cores']} cores)"]
    )
    width = len(HEADINGS)
    lines = [
        f"# {about['model']['id']}",
        "",
        f"{place}, {about['date']}. Medians of {about['rounds']} rounds after a warm-up;"
        " `spread` is (largest - smallest) / median of tokens/s.",
        "",
        *([f"Not complete: {report.ended}", ""] if report.ended else []),
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * width,
        *("| " + " | ".join(row(one)) + " |" for one in report.cells),
        "",
    ]
    for title, found in (
        (f"## Beside {report.against}", list(ratio_lines(report.ratios, report.against))),
        (f"## Compared with {report.compared}", list(change_lines(report.changes))),
        ("## Errors", reasons(report.cells)),
    ):
        if found:
            lines += [title, "", *(f"- {line}" for line in found), ""]
    lines += ["![Plot](results.svg)", ""] if has_plot else []
    lines += ["```", about["command"], "```", ""]
    software = ", ".join(f"{name} {version}" for name, version in about["software"].items())
    return "\n".join([*lines, f"Software: {software}.", ""])

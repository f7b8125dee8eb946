"""Draws a result with matplotlib, which the extra `bench` and the locks bring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nibble.bench.result import Measured

PANELS = (
    ("tokens_per_s", "", "Output tokens/s", "more is better"),
    ("ttft_ms", "ttft_p99_ms", "Time to first token, ms", "median, p99 dotted"),
    ("per_token_ms", "between_p99_ms", "Time between tokens, ms", "median, p99 dotted"),
)
UNDATED = {".svg": {"Date": None}}
INCHES, DOTS_PER_INCH = (12.6, 4.4), 130


def series(cells: Sequence[Measured]) -> Mapping[tuple[str, int, int], list[Measured]]:
    """(side, prompt tokens, output tokens) -> its cells by concurrency. Pure."""
    found: dict[tuple[str, int, int], list[Measured]] = {}
    for one in sorted(cells, key=lambda one: one.cell):
        key = (one.side, one.cell.prompt_tokens, one.cell.output_tokens)
        found.setdefault(key, []).append(one)
    return found


def draw(title: str, cells: Sequence[Measured], stem: Path) -> list[Path]:
    """Write STEM.svg and STEM.png. Raises ImportError without matplotlib."""
    import matplotlib as mpl

    mpl.use("agg")  # no display
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": "nibble", "font.size": 9}):
        figure, axes = pyplot.subplots(1, len(PANELS), figsize=INCHES, layout="constrained")
        figure.suptitle(title, fontweight="bold")
        for panel, axis in zip(PANELS, axes, strict=True):
            _panel(axis, panel, cells)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        paths = [stem.with_suffix(suffix) for suffix in (".svg", ".png")]
        for path in paths:
            figure.savefig(path, dpi=DOTS_PER_INCH, metadata=UNDATED.get(path.suffix))
        pyplot.close(figure)
    return paths


def _panel(axis: Any, panel: tuple[str, str, str, str], cells: Sequence[Measured]) -> None:
    figure, p99, name, note = panel
    several = len({one.side for one in cells}) > 1
    for place, ((side, prompt, output), line) in enumerate(series(cells).items()):
        where = [one.cell.concurrency for one in line]
        label = f"{side + ', ' if several else ''}{prompt} + {output} tokens"
        middle = [one.median(figure) for one in line]
        ends = list(zip(*(_reach(one, figure) for one in line), strict=True))
        colour = f"C{place}"
        axis.errorbar(where, middle, yerr=ends, marker="o", capsize=3, color=colour, label=label)
        if p99:
            axis.plot(where, [one.median(p99) for one in line], ":", color=colour, linewidth=1)
    ticks = sorted({one.cell.concurrency for one in cells})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_xlabel("requests at the same time")
    axis.set_title(f"{name}\n{note}", fontsize=9)
    axis.grid(alpha=0.3)


def _reach(one: Measured, figure: str) -> tuple[float, float]:
    """How far its rounds lie below and above their median."""
    values, middle = [getattr(turn, figure) for turn in one.rounds], one.median(figure)
    return middle - min(values), max(values) - middle

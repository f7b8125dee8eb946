"""Draws README's plot from the measured results, as an SVG for light and dark pages.

`python benchmarks/plot_readme.py` writes docs/images/results.svg from the JSON files of
benchmarks/results. With `--check` it only compares, and exits with 1 if the picture is out of date.
Standard library only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
PICTURE = REPOSITORY / "docs" / "images" / "results.svg"
STARTS, LOAD = "start_time_hopper.json", "serve_load_8b_h200.json"
WIDTH, HEIGHT = 960, 330
TOP, BOTTOM = 92, 262  # of the bars
BAR, GAP = 30, 4

STYLE = """
    .card { fill: #ffffff; stroke: #d0d7de; }
    .title { fill: #1f2328; font-size: 15px; font-weight: 600; }
    .text { fill: #57606a; font-size: 13px; }
    .value { fill: #1f2328; font-size: 12.5px; text-anchor: middle; }
    .middle { text-anchor: middle; }
    .axis { stroke: #8c959f; stroke-width: 1; }
    .vllm { fill: #8c959f; }
    .nibble { fill: #0969da; }
    @media (prefers-color-scheme: dark) {
      .card { fill: #0d1117; stroke: #30363d; }
      .title, .value { fill: #f0f6fc; }
      .text { fill: #b7bdc8; }
      .axis { stroke: #656c76; }
      .vllm { fill: #7d8590; }
      .nibble { fill: #4493f8; }
    }
"""


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def start_bars() -> list[tuple[str, float, float]]:
    """(caches, seconds of stock vLLM, seconds of nibble) from exec to the first answer."""
    summary = load(STARTS)["summary"]
    names = (("empty caches", "first"), ("filled caches", "second"))
    return [(label, summary[key]["vllm_s"], summary[key]["nibble_s"]) for label, key in names]


def token_bars() -> list[tuple[str, float, float]]:
    """(streams, milliseconds of stock vLLM, milliseconds of nibble) between tokens."""
    rows = load(LOAD)["rows"]
    prompt = rows[0]["prompt_tokens"]
    return [
        (str(row["streams"]), row["stock"]["tpot_ms"], row["nibble"]["tpot_ms"])
        for row in rows
        if row["prompt_tokens"] == row["output_tokens"] == prompt
    ]


def panel(
    left: int,
    width: int,
    title: str,
    unit: str,
    axis: str,
    bars: Sequence[tuple[str, float, float]],
) -> list[str]:
    """One panel: a pair of bars for each entry, the figure above each bar."""
    scale = (BOTTOM - TOP - 18) / max(max(vllm, nibble) for _, vllm, nibble in bars)
    lines = [
        f'<text class="title" x="{left}" y="34">{title}</text>',
        f'<text class="text" x="{left}" y="54">{unit}</text>',
        f'<path class="axis" d="M{left} {BOTTOM}.5H{left + width}"/>',
        f'<text class="text middle" x="{left + width // 2}" y="{BOTTOM + 44}">{axis}</text>',
    ]
    for index, (label, *pair) in enumerate(bars):
        middle = left + int((index + 0.5) * width / len(bars))
        lines.append(f'<text class="text middle" x="{middle}" y="{BOTTOM + 20}">{label}</text>')
        places = (middle - BAR - GAP // 2, middle + GAP // 2)
        for kind, value, x in zip(("vllm", "nibble"), pair, places, strict=True):
            height = round(value * scale, 1)
            figure = (
                f"{value:.0f}"
                if value >= 100
                else f"{value:.1f}"
                if value >= 10
                else f"{value:.2f}"
            )
            top = BOTTOM - height
            size = f'y="{top:.1f}" width="{BAR}" height="{height}"'
            lines += [
                f'<rect class="{kind}" x="{x}" {size}/>',
                f'<text class="value" x="{x + BAR // 2}" y="{top - 5:.1f}">{figure}</text>',
            ]
    return lines


def legend(x: int, y: int) -> list[str]:
    return [
        f'<rect class="vllm" x="{x}" y="{y - 11}" width="13" height="13"/>',
        f'<text class="text" x="{x + 20}" y="{y}">vLLM 0.32.0 alone</text>',
        f'<rect class="nibble" x="{x + 150}" y="{y - 11}" width="13" height="13"/>',
        f'<text class="text" x="{x + 170}" y="{y}">nibble</text>',
    ]


def picture() -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        f' width="{WIDTH}" height="{HEIGHT}" role="img" aria-labelledby="title"'
        " font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif\">",
        '<title id="title">Start time and time between tokens of a Qwen3-8B shape in NVFP4 on one'
        " H200, with vLLM 0.32.0 alone and with nibble</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10"/>',
        *panel(40, 300, "Start to first answer", "seconds, lower is better", "", start_bars()),
        *panel(
            400,
            520,
            "Time between tokens",
            "milliseconds, lower is better",
            "streams at the same time",
            token_bars(),
        ),
        *legend(40, HEIGHT - 20),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--check", action="store_true", help="compare with the file, change nothing"
    )
    fresh = picture()
    if not parser.parse_args().check:
        PICTURE.write_text(fresh)
    elif not PICTURE.is_file() or PICTURE.read_text() != fresh:
        sys.exit(
            f"{PICTURE.relative_to(REPOSITORY)} is stale; run `python benchmarks/plot_readme.py`"
        )


if __name__ == "__main__":
    main()

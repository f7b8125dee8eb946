"""Writes docs/benchmarks.md's overview of README's figures, and their plot, from the results.

`python benchmarks/plot_figures.py` reads the JSON files of benchmarks/results, writes the block
"figures" of docs/benchmarks.md and docs/images/figures.svg, and checks that README states each
figure as the data has it. With `--check` it writes nothing and exits with 1 where one is stale.
Standard library only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
README, PAGE = REPOSITORY / "README.md", REPOSITORY / "docs" / "benchmarks.md"
PICTURE = REPOSITORY / "docs" / "images" / "figures.svg"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
WIDTH, ROW, TOP, LEFT, SPAN = 960, 30, 74, 420, 320
STYLE = """
    .card { fill: #ffffff; stroke: #d0d7de; }
    .title { fill: #1f2328; font-size: 15px; font-weight: 600; }
    .text { fill: #57606a; font-size: 13px; }
    .value { fill: #1f2328; font-size: 12.5px; }
    .one { stroke: #8c959f; stroke-width: 1; stroke-dasharray: 4 3; }
    .bar { fill: #0969da; }
    @media (prefers-color-scheme: dark) {
      .card { fill: #0d1117; stroke: #30363d; }
      .title, .value { fill: #f0f6fc; }
      .text { fill: #b7bdc8; }
      .one { stroke: #656c76; }
      .bar { fill: #4493f8; }
    }
"""


@dataclass(frozen=True)
class Figure:
    """A pair that README states. `in_readme`: the two numbers as README writes them."""

    what: str
    unit: str
    ours: float
    theirs: float
    against: str
    is_rate: bool
    hardware: str
    file: str
    digits: int

    @property
    def ratio(self) -> float:
        """How many times as fast nibble is."""
        return self.ours / self.theirs if self.is_rate else self.theirs / self.ours

    @property
    def in_readme(self) -> tuple[str, str]:
        return tuple(f"{value:.{self.digits}f}" for value in (self.ours, self.theirs))  # type: ignore


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def figures() -> Iterator[Figure]:
    """Every figure of README's results that compares two times or rates."""
    name = "start_time_hopper.json"
    for key, what, digits in (("first", "empty", 0), ("second", "filled", 1)):
        found = load(name)["summary"][key]
        yield Figure(f"start to first answer, {what} caches", "s", found["nibble_s"],
                     found["vllm_s"], "vLLM", False, "H200", name, digits)  # fmt: skip
    name = "host_floor_h200.json"
    for row in load(name)["rows"]:
        if (row["model"], row["streams"]) == ("dense2", 8):
            yield Figure("time between tokens, two layers, 8 streams", "ms", row["nibble_ms"],
                         row["stock_ms"], "vLLM", False, "H200", name, 2)  # fmt: skip
    name = "serve_load_8b_h200.json"
    for row in load(name)["rows"]:
        if row["prompt_tokens"] == row["output_tokens"] == 256:
            yield Figure(f"tokens/s, 8B shape, {row['streams']} stream(s)", "tokens/s",
                         row["nibble"]["tokens_per_s"], row["stock"]["tokens_per_s"], "vLLM", True,
                         "H200", name, 0)  # fmt: skip
    name = "cpu_llama.json"
    for row in load(name)["rows"]:
        if (row["model"], row["cores"], row["what"]) == ("1.7b", 2, "decode 1"):
            ours, theirs = row["nibble_w4a16"], row["llama_q4_0"]
            yield Figure("decode, 1.7B shape, one stream", "tokens/s", ours, theirs,
                         "llama.cpp Q4_0", True, "CPU, two cores", name, 1)  # fmt: skip
    name = "start_overhead_one_process.json"
    found = load(name)["overhead"]
    yield Figure("start to first answer, BF16 demo", "s", middle(found["nibble_s"]),
                 middle(found["vllm_s"]), "vLLM", False, "CPU, two cores", name, 1)  # fmt: skip


def middle(values: Sequence[float]) -> float:
    """The median."""
    order = sorted(values)
    half = len(order) // 2
    return order[half] if len(order) % 2 else (order[half - 1] + order[half]) / 2


def block(found: Sequence[Figure]) -> str:
    """The overview in Markdown."""
    said = "; ".join(f"{one.what}: {one.ratio:.2f} times" for one in found)
    lines = [
        f"![How many times as fast as the other program. {said}.](images/figures.svg)",
        "",
        "| what | nibble | other | ratio | hardware, date | data |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        machine = load(one.file)["machine"]
        ours, theirs = one.in_readme
        lines.append(
            f"| {one.what} | {ours} {one.unit} | {theirs} {one.unit} ({one.against}) |"
            f" {one.ratio:.2f}× | {one.hardware}, {machine['date'][:10]} |"
            f" [JSON](../benchmarks/results/{one.file}) |"
        )
    return "\n".join(lines)


def picture(found: Sequence[Figure]) -> str:
    """Bars of ratios; a line marks the other program's speed."""
    height = TOP + ROW * len(found) + 16
    scale = SPAN / max(one.ratio for one in found)
    one_x = LEFT + scale
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
        f' height="{height}" role="img" aria-labelledby="title"'
        " font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif\">",
        '<title id="title">How many times as fast nibble is as vLLM or llama.cpp</title>',
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10"/>',
        '<text class="title" x="24" y="32">How many times as fast nibble is</text>',
        '<text class="text" x="24" y="52">more is better; the line is the other program</text>',
    ]
    for place, one in enumerate(found):
        y = TOP + ROW * place
        ours, theirs = one.in_readme
        length = round(one.ratio * scale, 1)
        label = escape(f"{one.what} ({one.hardware.partition(',')[0]}, vs {one.against})")
        numbers = f"{one.ratio:.2f}× ({ours} vs {theirs} {one.unit})"
        lines += [
            f'<text class="text" x="24" y="{y + 14}">{label}</text>',
            f'<rect class="bar" x="{LEFT}" y="{y}" width="{length}" height="18"/>',
            f'<text class="value" x="{LEFT + length + 6:.1f}" y="{y + 14}">{numbers}</text>',
        ]
    bottom = TOP + ROW * len(found)
    lines += [f'<path class="one" d="M{one_x:.1f} {TOP - 6}V{bottom - 6}"/>', "</svg>"]
    return "\n".join(lines) + "\n"


def missing(found: Sequence[Figure], readme: str) -> list[str]:
    """Figures that README does not state as the data has them."""
    named = [one for one in found if not one.what.startswith("start to first answer, BF16")
             and "filled" not in one.what]  # fmt: skip
    return [
        f"{one.what}: {' vs '.join(one.in_readme)}"
        for one in named
        if f"{one.in_readme[0]} vs {one.in_readme[1]}" not in readme
        and f"{one.in_readme[0]} {one.unit} vs {one.in_readme[1]}" not in readme
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--check", action="store_true", help="compare with the files, change nothing"
    )
    check = parser.parse_args().check
    found = list(figures())
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    fresh = {
        PAGE: f"{before}{BEGIN}\n{block(found)}\n{END}{rest.partition(END)[2]}",
        PICTURE: picture(found),
    }
    stale = [path for path, text in fresh.items()
             if not path.is_file() or path.read_text() != text]  # fmt: skip
    if not check:
        for path in stale:
            path.write_text(fresh[path])
        stale = []
    for line in (wrong := missing(found, README.read_text())):
        print(f"README.md does not state {line}", file=sys.stderr)
    for path in stale:
        print(f"{path.relative_to(REPOSITORY)} is stale; run `python benchmarks/plot_figures.py`",
              file=sys.stderr)  # fmt: skip
    sys.exit(1 if stale or wrong else 0)


if __name__ == "__main__":
    main()

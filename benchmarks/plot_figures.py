"""Draws the plot of README's figures from the results, and checks that README states them.

`python benchmarks/plot_figures.py` reads the JSON files of benchmarks/results, writes
docs/images/figures.svg, and checks that each number of README's results is in the data.
With `--check` it writes nothing and exits with 1 where one is stale. make_page.py has the table of
the same figures. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from html import escape
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
README = REPOSITORY / "README.md"
PICTURE = REPOSITORY / "docs" / "images" / "figures.svg"
WIDTH, ROW, TOP, LEFT, SPAN = 960, 30, 74, 420, 320
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\d)")
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
        return rounded(self.ours, self.digits), rounded(self.theirs, self.digits)


def rounded(value: float, digits: int) -> str:
    """The number with so many digits after the point; halves go up, as people round."""
    return str(Decimal(str(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


SERVERS = {
    "serve_load_8b_h200.json": "8B shape",
    "serve_load_30b_a3b_h200.json": "30B-A3B shape",
    "serve_load_35b_a3b_h200.json": "35B-A3B shape",
}  # default settings on both sides, with experts 16 GiB of KV cache
FIRST_TOKENS = {
    "serve_load_8b_h200.json": (16, 256, 1024),
    "serve_load_30b_a3b_h200.json": (16, 64, 256),
}  # tokens of a prompt


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
    for name, shape in SERVERS.items():
        for row in load(name)["rows"]:
            if row["prompt_tokens"] == row["output_tokens"] == 256:
                yield Figure(f"tokens/s, {shape}, {row['streams']} stream(s)", "tokens/s",
                             row["nibble"]["tokens_per_s"], row["stock"]["tokens_per_s"], "vLLM",
                             True, "H200", name, 0)  # fmt: skip
    for name, prompts in FIRST_TOKENS.items():
        for row in load(name)["rows"]:
            if row["output_tokens"] == 8 and row["prompt_tokens"] in prompts:
                what = f"first token, {SERVERS[name]}, prompt of {row['prompt_tokens']}"
                yield Figure(what, "ms", row["nibble"]["ttft_ms"], row["stock"]["ttft_ms"], "vLLM",
                             False, "H200", name, 1)  # fmt: skip
    name = "bench_real_model_h200.json"
    sides = {(row["side"], row["concurrency"]): row["median"] for row in load(name)["cells"]}
    for streams in (1, 8, 32):
        ours, theirs = (sides[side, streams]["tokens_per_s"] for side in ("nibble", "stock"))
        yield Figure(f"tokens/s, SmolLM2-135M-Instruct, {streams} stream(s)", "tokens/s", ours,
                     theirs, "vLLM", True, "H200", name, 0)  # fmt: skip
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
    said = "; ".join(f"{one.what}: {rounded(one.ratio, 2)} times" for one in found)
    lines = [
        f"![How many times as fast as the other program. {said}.](images/figures.svg)",
        "",
        "| what | nibble | other | ratio | hardware, date | data |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        data = load(one.file)
        date = (data.get("date") or data["machine"]["date"])[:10]
        ours, theirs = one.in_readme
        lines.append(
            f"| {one.what} | {ours} {one.unit} | {theirs} {one.unit} ({one.against}) |"
            f" {rounded(one.ratio, 2)}× | {one.hardware}, {date} |"
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
        numbers = f"{rounded(one.ratio, 2)}× ({ours} vs {theirs} {one.unit})"
        lines += [
            f'<text class="text" x="24" y="{y + 14}">{label}</text>',
            f'<rect class="bar" x="{LEFT}" y="{y}" width="{length}" height="18"/>',
            f'<text class="value" x="{LEFT + length + 6:.1f}" y="{y + 14}">{numbers}</text>',
        ]
    bottom = TOP + ROW * len(found)
    lines += [f'<path class="one" d="M{one_x:.1f} {TOP - 6}V{bottom - 6}"/>', "</svg>"]
    return "\n".join(lines) + "\n"


def stated(readme: str) -> Iterator[tuple[str, list[str]]]:
    """Each row of README's table of results: what, and the numbers of its second cell; and the
    description of its plot.
    """
    section = readme.partition("\n## Results\n")[2].partition("\n## ")[0]
    for line in section.splitlines():
        if line.startswith("!["):
            yield "the plot", _NUMBER.findall(line.partition("](")[0])
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 2 and _NUMBER.search(cells[1]):
            yield cells[0], _NUMBER.findall(cells[1])


def other_numbers() -> Iterator[str]:
    """Numbers of README's results beside its pairs of times and rates."""
    for case in load("nvfp4_layers_cpu.json")["cases"][:2]:
        for part in ("q", "k", "v"):
            percent = 100 * case["errors"][part]["original"]
            yield f"{percent:.0f}" if percent > 100 else f"{percent:.1f}"
    faults = [
        fault
        for model in load("reference_faults_cpu.json")["models"].values()
        for name, fault in model["faults"].items()
        if name != "none" and "definition" in fault
    ]
    yield str(len(faults))
    yield str(sum(fault["definition"].startswith("failed") for fault in faults))
    drain = load("robustness_h200.json")["tests"]["test_sigterm_loses_none_of_64_streams"]
    yield str(drain["streams"])
    yield "0"  # its exit code
    for row in load("serve_load_8b_h200.json")["rows"]:
        yield str(row["streams"])
        yield from (f"{row[side]['tpot_ms']:.2f}" for side in ("stock", "nibble"))


def missing(found: Sequence[Figure], readme: str) -> list[str]:
    """Rows of README's results with a number that the data does not have."""
    known = set(other_numbers())
    for one in found:
        known |= {*one.in_readme, rounded(one.ratio, 2), rounded(one.ratio, 1)}
    lines = []
    for what, numbers in stated(readme):
        unknown = [number for number in numbers if number not in known]
        if unknown:
            lines.append(f"{what}: {', '.join(unknown)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--check", action="store_true", help="compare with the files, change nothing"
    )
    check = parser.parse_args().check
    found = list(figures())
    fresh = picture(found)
    is_stale = not PICTURE.is_file() or PICTURE.read_text() != fresh
    if is_stale and not check:
        PICTURE.write_text(fresh)
        is_stale = False
    for line in (wrong := missing(found, README.read_text())):
        print(f"README.md states what no result has: {line}", file=sys.stderr)
    if is_stale:
        name = PICTURE.relative_to(REPOSITORY)
        print(f"{name} is stale; run `python benchmarks/plot_figures.py`", file=sys.stderr)
    sys.exit(1 if is_stale or wrong else 0)


if __name__ == "__main__":
    main()

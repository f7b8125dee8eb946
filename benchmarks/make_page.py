"""Writes docs/benchmarks.md from page.template and the results, so that no figure is typed.

    python benchmarks/make_page.py [--check | --adopt]

page.template, beside this file, is the page with expressions in place of figures. `--check` writes
nothing and exits with 1 where the page is stale. `--adopt` takes lines that were changed in the
page itself over into the template; put expressions in place of their figures afterwards.

    {{ start_time_hopper: summary/first/vllm_s: .0f }}          a value, and Python's format
    {{ start_time_hopper: summary/first/vllm_s / summary/first/nibble_s: .1f }}
    {{ host_floor_h200: rows/[model=dense2,streams=8]/stock_ms: .2f }}
    {{ cpu_llama: rows/0/ratio: .3s }}                           three digits in all
    {{ start_overhead: median overhead/vllm_s: .1f }}            also mean, geomean, min, max, sum,
                                                                 count, failed
    {{ host_floor_h200: rows/[model=dense2]/0/steady_share * 100: .1f }}
    {{ each host_floor_h200: rows/[model=dense2] }} … {{ end }}  the lines between, once for each;
                                                                 a path of an item begins with "."
    {{ figures }}                                                the overview of plot_figures.py

A filter keeps the items of a list that have those values; one item that is left stands for itself.
`*` takes every item, also a dictionary's. Standard library only.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import plot_figures

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
TEMPLATE, PAGE = REPOSITORY / "benchmarks" / "page.template", REPOSITORY / "docs" / "benchmarks.md"
_EXPRESSION = re.compile(r"\{\{ (.+?) \}\}")
_FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "median": statistics.median,
    "mean": statistics.mean,
    "geomean": statistics.geometric_mean,
    "min": min,
    "max": max,
    "sum": sum,
    "count": len,
    "failed": lambda values: sum(str(one).startswith("failed") for one in values),
}
_OPERATORS: Mapping[str, Callable[[float, float], float]] = {
    "/": lambda one, other: one / other,
    "*": lambda one, other: one * other,
    "-": lambda one, other: one - other,
    "+": lambda one, other: one + other,
}


class Wrong(Exception):
    """An expression that the data does not answer."""


@cache
def load(name: str) -> Any:
    """The JSON file of that name."""
    try:
        return json.loads((RESULTS / f"{name}.json").read_text())
    except OSError:
        raise Wrong(f"there is no benchmarks/results/{name}.json") from None


def find(data: Any, path: str) -> Any:
    """The value at `path`; "/" separates keys, "~" is a "/" of a key."""
    found = data
    for step in filter(None, path.removeprefix(".").split("/")):
        found = _step(found, step.replace("~", "/"), path)
    return found


def _step(found: Any, step: str, path: str) -> Any:
    if step == "*":
        inside = found if isinstance(found, _Each) else [found]
        parts = (one.values() if isinstance(one, dict) else one for one in inside)
        return _Each(one for part in parts for one in part if one is not None)
    if isinstance(found, _Each):  # of items that differ, those that have it
        has = (one for one in found if not isinstance(one, dict) or step in one)
        return _Each(_step(one, step, path) for one in has if isinstance(one, (dict, list)))
    try:
        if step.startswith("["):
            return _filtered(found, step[1:-1])
        return found[int(step)] if isinstance(found, list) else found[step]
    except (KeyError, IndexError, ValueError, TypeError):
        raise Wrong(f"{path} has no {step}") from None


class _Each(list[Any]):
    """Values to which the next steps apply one by one."""


def _filtered(items: Sequence[Mapping[str, Any]], conditions: str) -> Any:
    wanted = [one.split("=") for one in conditions.split(",")]
    kept = [one for one in items if all(str(one.get(key)) == value for key, value in wanted)]
    if not kept:
        raise KeyError
    return kept[0] if len(kept) == 1 else kept


def value_of(text: str, data: Any) -> Any:
    """An expression without its format: `[function] path [operator path-or-number]`."""
    for sign, operator in _OPERATORS.items():
        left, found, right = text.partition(f" {sign} ")
        if found:
            return operator(value_of(left, data), value_of(right, data))
    name, _, path = text.partition(" ")
    if name in _FUNCTIONS and path:
        return _FUNCTIONS[name](find(data, path))
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        return find(data, text)


def shown(expression: str, item: Any = None) -> str:
    """What an expression stands for."""
    if expression == "figures":
        return plot_figures.block(list(plot_figures.figures()))
    if expression.startswith("."):
        text, _, spec = expression.partition(": ")
        data = item
    else:
        name, _, rest = expression.partition(": ")
        text, _, spec = rest.partition(": ")
        data = load(name)
    value = value_of(text, data)
    if isinstance(value, (dict, list)):
        raise Wrong(f"{expression} is not one value")
    if spec == ".3s":  # three digits, as many after the point as they leave
        spec = f".{max(0, 2 - int(math.log10(abs(value))))}f"
    if isinstance(value, (int, float)) and spec.endswith("f"):
        return plot_figures.rounded(value, int(spec[1:-1]))
    return format(value, spec)


def render(template: Sequence[str]) -> list[tuple[int, str]]:
    """The page's lines, each with the number of its line in the template."""
    lines: list[tuple[int, str]] = []
    block: list[tuple[int, str]] | None = None
    items: Any = None
    for number, line in enumerate(template):
        if line.startswith("{{ each "):
            name, _, path = line.removeprefix("{{ each ").removesuffix(" }}").partition(": ")
            found = _at(number, lambda name=name, path=path: find(load(name), path))
            items, block = found if isinstance(found, list) else [found], []
        elif line == "{{ end }}" and block is not None:
            lines += [part for item in items for part in _lines(block, item)]
            block = None
        elif block is not None:
            block.append((number, line))
        else:
            lines += _lines([(number, line)], None)
    return lines


def _lines(block: Sequence[tuple[int, str]], item: Any) -> Iterator[tuple[int, str]]:
    for number, line in block:
        text = _EXPRESSION.sub(
            lambda found, number=number: _at(number, lambda: shown(found[1], item)), line
        )
        yield from ((number, part) for part in text.split("\n"))


def _at(number: int, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Wrong as error:
        sys.exit(f"benchmarks/page.template:{number + 1}: {error}")


def adopt(template: Sequence[str], page: Sequence[str]) -> list[str]:
    """The template with the lines that differ in the page, as they stand there."""
    rendered = render(template)
    found = list(template)
    matcher = difflib.SequenceMatcher(None, [text for _, text in rendered], page, autojunk=False)
    for kind, start, end, from_page, to_page in reversed(matcher.get_opcodes()):
        if kind == "equal":
            continue
        numbers = [number for number, _ in rendered[start:end]]
        first = numbers[0] if numbers else (rendered[start - 1][0] + 1 if start else 0)
        last = numbers[-1] + 1 if numbers else first
        found[first:last] = page[from_page:to_page]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, change nothing")
    parser.add_argument("--adopt", action="store_true", help="take the page's changes over")
    options = parser.parse_args()
    template = TEMPLATE.read_text().splitlines()
    current = PAGE.read_text().splitlines() if PAGE.is_file() else []
    if options.adopt:
        template = adopt(template, current)
        TEMPLATE.write_text("\n".join(template) + "\n")
    page = [text for _, text in render(template)]
    if options.check:
        different = next((line for line in difflib.ndiff(current, page) if line[0] in "+-"), None)
        if different is not None:
            how = "run `python benchmarks/make_page.py`, or with --adopt for lines typed there"
            sys.exit(f"docs/benchmarks.md is stale at {different[:200]!r}; {how}")
        return
    PAGE.write_text("\n".join(page) + "\n")


if __name__ == "__main__":
    main()

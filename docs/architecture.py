"""Draws docs/architecture.svg and the table in docs/architecture.md from nibble's own imports.

    python docs/architecture.py [--check]     # --check writes nothing; exit 1 where a file is stale

A row is a room; an arc on the right joins a room with one it imports, wider for more imports.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SVG, PAGE = ROOT / "docs/architecture.svg", ROOT / "docs/architecture.md"
BEGIN, END = "<!-- rooms: begin -->", "<!-- rooms: end -->"
# Top to bottom as in pyproject.toml's contract: the question of a room, and what may enter it.
ROOMS = {
    "cli": ("What do people type?", "A verb: reads words, calls the rooms below, prints."),
    "bench": ("How fast and how steady is it?", "A client that measures a running server."),
    "bundle": ("How does a model reach a machine without a network?", "A folder with an image."),
    "cluster": ("How do several machines serve one model?", "What needs a second machine."),
    "serve": ("How does a server start, run and end?", "Effects around a running vLLM."),
    "canary": ("Are its answers right?", "A check of a running server, and its verdict."),
    "plan": (
        "Which settings, and why?",
        "A pure decision with its reason. Only `gather` and `files` have effects.",
    ),
    "reference": (
        "What would the right answer be?",
        "Computation of a reference, in a process that may import torch.",
    ),
    "recipes": ("What is known about models and backends?", "Readers of recipes/ and rules/."),
    "checkpoint": ("What is this model?", "Facts read from a checkpoint's files, and `convert`."),
    "hub": ("Is the model on this disk?", "Access to the Hugging Face Hub and its cache."),
    "settings": ("What did the user set?", "Options, their sources, secrets."),
    "engine": (
        "Where does nibble touch vLLM?",
        "vLLM's flags, process, API, log, patches; the gate and the plugin, which run inside it.",
    ),
    "machine": ("What is this machine?", "Hardware, memory, processes, paths. No nibble policy."),
}
WIDTH, ROW, TOP, LEFT, BOX = 810, 46, 14, 14, 520


def modules() -> dict[str, Path]:
    """Module name -> file, of the package."""
    found = {}
    for path in sorted((ROOT / "nibble").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str | None:
    """The room of a module; None for what stands beside them (`nibble.errors`)."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else None


def imports(path: Path) -> set[str]:
    """Modules of nibble that a file imports, at whatever level."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return {name for name in found if name.split(".")[0] == "nibble"}


def count() -> tuple[Counter[str], Counter[tuple[str, str]]]:
    """Modules of each room, and imports between two rooms."""
    known = modules()
    sizes: Counter[str] = Counter()
    between: Counter[tuple[str, str]] = Counter()
    for module, path in known.items():
        here = room_of(module)
        if here is None:
            continue
        sizes[here] += path.name != "__init__.py" or path.stat().st_size > 200
        for name in imports(path) & known.keys():
            there = room_of(name)
            if there is not None and there != here and name.count(".") > 1:
                between[here, there] += 1
    return sizes, between


def draw(sizes: Counter[str], between: Counter[tuple[str, str]]) -> str:
    """The picture; its colours follow the reader's light or dark theme."""
    rows = {room: TOP + place * ROW for place, room in enumerate(ROOMS)}
    height = TOP * 2 + len(ROOMS) * ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" '
        'aria-label="Rooms of nibble, top to bottom, and the imports between them">',
        "<style>.b{fill:#f3f6fa;stroke:#8aa0b8}.t{fill:#12263a;font:600 15px sans-serif}"
        ".q{fill:#34506b;font:13px sans-serif}.n{fill:#5b738c;font:12px sans-serif;"
        "text-anchor:end}.a{fill:none;stroke:#2f6fb3;stroke-opacity:.42}"
        "@media(prefers-color-scheme:dark){.b{fill:#1b2735;stroke:#53708f}.t{fill:#e8f0f8}"
        ".q{fill:#b9cde0}.n{fill:#8fa8c0}.a{stroke:#74b0ee}}</style>",
    ]
    for room, y in rows.items():
        middle = y + ROW / 2
        parts += [
            f'<rect class="b" x="{LEFT}" y="{y + 4}" width="{BOX}" height="{ROW - 8}" rx="6"/>',
            f'<text class="t" x="{LEFT + 14}" y="{middle + 5}">{room}/</text>',
            f'<text class="q" x="{LEFT + 122}" y="{middle + 5}">{escape(ROOMS[room][0])}</text>',
            f'<text class="n" x="{LEFT + BOX - 12}" y="{middle + 5}">{sizes[room]} modules</text>',
        ]
    edge = LEFT + BOX
    for (upper, lower), number in sorted(between.items(), key=lambda one: (-one[1], one[0])):
        start, end = rows[upper] + ROW / 2 + 5, rows[lower] + ROW / 2 - 5
        reach = edge + 22 + (end - start) * 0.62
        width = min(9.0, 0.8 + number**0.5 * 0.9)
        parts.append(
            f'<path class="a" stroke-width="{width:.1f}" d="M{edge} {start:.0f} C{reach:.0f} '
            f'{start:.0f} {reach:.0f} {end:.0f} {edge} {end:.0f}"><title>{upper} imports {lower}: '
            f"{number}</title></path>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def table(sizes: Counter[str], between: Counter[tuple[str, str]]) -> str:
    """The rooms as a table."""
    rows = [
        "| room | question | what may enter | modules | imports from |",
        "|---|---|---|---|---|",
    ]
    for room, (question, rule) in ROOMS.items():
        below = ", ".join(f"`{other}`" for other in ROOMS if between[room, other])
        rows.append(f"| `{room}/` | {question} | {rule} | {sizes[room]} | {below} |")
    return "\n".join(rows)


def main() -> int:
    counted = count()
    page = PAGE.read_text()
    text = re.sub(
        f"{BEGIN}.*?{END}",
        lambda _: f"{BEGIN}\n\n{table(*counted)}\n\n{END}",
        page,
        flags=re.DOTALL,
    )
    stale = [
        path
        for path, wanted in ((SVG, draw(*counted)), (PAGE, text))
        if not path.exists() or path.read_text() != wanted
    ]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"stale: {path.relative_to(ROOT)}; run `python docs/architecture.py`")
        return 1 if stale else 0
    SVG.write_text(draw(*counted))
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

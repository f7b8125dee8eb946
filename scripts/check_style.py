#!/usr/bin/env python3
"""Check the language of documentation, comments and messages; `make style` and `make lint` run it.

    scripts/check_style.py               # pages, CHANGELOG, shell, TOML, YAML, Dockerfiles
    scripts/check_style.py --python      # also docstrings, comments and strings of Python files
    scripts/check_style.py FILE ...      # these files alone

Each problem is one line, `FILE:LINE: what is wrong; what to write`, and the exit code is 1. A page's code blocks, inline
code, links' targets and generated tables are not checked: those come from programs. `# style: ignore` at the end of a
line exempts that line.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PROSE_COLUMNS = 100
CHANGELOG_COLUMNS = 119
IGNORE = "style: ignore"
EXEMPT = ("scripts/check_style.py", "tests/unit/test_check_style.py", "LICENSE")

# Words of docs that have a plainer form: a pattern and what to write instead.
WORDS = {
    r"(?:un)?mend(?:s|ed|ing)?": "fix",
    r"nobody(?:'s)?|whoever|somebody(?:'s)?": "name the actor: user, client, process",
    r"(?:is|are|was|were) no (?!longer\b|more\b|less\b|larger\b|smaller\b|faster\b|slower\b)\w+": "is not",
    r"of (?:its|their|your|our|his|her|one's) own": "own, separate, or nothing",
    r"without a word": "without a message",
    r"books right": "corrects",
    r"(?:as|where|than) (?:it|that|they|this) (?:errs?|comes?)(?: less)?": "name the case",
    r"excepted": "except",
    r"(\d[\d.,]*) ?(ms|µs|us|s|tokens/s|GB/s|GB|MB|%)? for \d[\d.,]* ?\2(?=[\s.,;:)]|$)(?! \w+s\b)": "write a ratio as '2.2x faster (104 s vs 234 s)'",
    r"leases?|leased": "a GPU machine without a network",
    r"the seeds?'?s?|seeds? 0\d\d": "name the project or the report",
}
BANNED = [(re.compile(rf"(?<![\w-])(?:{pattern})(?![\w-])", re.I), advice) for pattern, advice in WORDS.items()]
CITATION = re.compile(r"(?<![\w*])([\w-]+\.md)\b(?! *=)|(\.\./shared\b)")
SECTION_OF_A_REFERENCE = re.compile(r"\bpatches\.md \d")


class Problem(NamedTuple):
    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


def words(text: str) -> Iterator[str]:
    """What is wrong with the words of one piece of prose."""
    for pattern, advice in BANNED:
        for match in pattern.finditer(text):
            yield f"'{match[0]}'; {advice}"


def citations(text: str, shipped: frozenset[str]) -> Iterator[str]:
    """Files that a text names and that are not in the repository."""
    for match in CITATION.finditer(text):
        if match[0] not in shipped:
            yield f"'{match[0]}' is not in the repository; cite a file that ships, or the source itself"
    if match := SECTION_OF_A_REFERENCE.search(text):
        yield f"'{match[0]}' is not in the repository; docs/patches.md has rows, not sections"


def prose_of(line: str) -> str:
    """A line of Markdown without inline code and addresses, which are not prose."""
    return re.sub(r"`[^`]*`|\]\([^)]*\)|https?://\S+", " ", line)


def page(path: str, text: str, shipped: frozenset[str]) -> Iterator[Problem]:
    """Problems of a Markdown page."""
    fenced = generated = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        generated = line.startswith("<!-- generated:") or (generated and not line.startswith("<!-- end"))
        if fenced or generated or line.startswith(("```", "    ", "<!--")) or IGNORE in line:
            continue
        if len(line) > PROSE_COLUMNS and not line.lstrip().startswith(("|", "![", "[")):
            if not path.endswith("CHANGELOG.md"):
                yield Problem(path, number, f"{len(line)} columns; break prose at {PROSE_COLUMNS}")
        for what in (*words(prose_of(line)), *citations(re.sub(r"https?://\S+", " ", line), shipped)):
            yield Problem(path, number, what)


def changelog(path: str, text: str) -> Iterator[Problem]:
    """Entries of the changelog: one line each, short enough to read at a glance."""
    entry = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("- "):
            entry = True
            if len(line) > CHANGELOG_COLUMNS:
                yield Problem(path, number, f"{len(line)} columns; an entry has under {CHANGELOG_COLUMNS + 1}")
        elif entry and line.startswith("  "):
            yield Problem(path, number, "a second line of an entry; write one line for one change")
        else:
            entry = False


def comments(path: str, text: str, shipped: frozenset[str]) -> Iterator[Problem]:
    """Problems of comments and strings in shell, TOML, YAML, Dockerfiles and Makefiles: every line is read."""
    for number, line in enumerate(text.splitlines(), 1):
        if IGNORE in line:
            continue
        for what in (*words(prose_of(line)), *citations(re.sub(r"https?://\S+", " ", line), shipped)):
            yield Problem(path, number, what)


def python(path: str, text: str, shipped: frozenset[str]) -> Iterator[Problem]:
    """Problems of a Python file: docstrings and sentences in strings by ast, comments by tokenize."""
    lines = text.splitlines()
    pieces: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            pieces += [(node.lineno + index, part) for index, part in enumerate(node.value.splitlines())]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            pieces.append((token.start[0], token.string))
    for number, piece in pieces:
        if number <= len(lines) and IGNORE in lines[number - 1]:
            continue
        for what in (*words(prose_of(piece)), *citations(re.sub(r"https?://\S+", " ", piece), shipped)):
            yield Problem(path, number, what)


def check(path: str, text: str, shipped: frozenset[str]) -> list[Problem]:
    """All problems of one file, by its kind."""
    if path.endswith(".py"):
        return list(python(path, text, shipped))
    if path.endswith(".md"):
        found = list(page(path, text, shipped))
        return found + list(changelog(path, text)) if path.endswith("CHANGELOG.md") else found
    return list(comments(path, text, shipped))


def is_text(path: str) -> bool:
    """Files other than Python whose language is checked."""
    name = Path(path).name
    endings = (".md", ".sh", ".toml", ".yaml", ".hcl", ".container", ".service", ".patch", ".ini")
    return name.endswith(endings) or name.startswith("Dockerfile") or name in ("Makefile", "run")


def tracked() -> list[str]:
    listed = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"]
    output = subprocess.run(listed, check=True, capture_output=True, text=True)
    return [path for path in output.stdout.splitlines() if (ROOT / path).is_file()]


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="*", help="files to check; default: all in the repository")
    parser.add_argument("--python", action="store_true", help="also Python files")
    options = parser.parse_args(None if arguments is None else list(arguments))
    paths = tracked()
    shipped = frozenset(Path(path).name for path in paths if path.endswith(".md"))
    chosen = options.files or [path for path in paths if is_text(path) or (options.python and path.endswith(".py"))]
    problems = [
        problem
        for path in chosen
        if path not in EXEMPT
        for problem in check(path, (ROOT / path).read_text(), shipped)
    ]
    for problem in problems:
        print(problem)
    if problems:
        print(f"{len(problems)} problem(s) of style in {len({one.path for one in problems})} file(s)", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

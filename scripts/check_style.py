#!/usr/bin/env python3
"""Check the language of documentation, comments and messages; `make style` and `make lint` run it.

    scripts/check_style.py               # pages, CHANGELOG, shell, TOML, YAML, Dockerfiles
    scripts/check_style.py --python      # also docstrings, comments and sentences in Python files
    scripts/check_style.py FILE ...      # these files alone

Each problem is one line, `FILE:LINE: what is wrong; what to write`, and the exit code is 1. The
check skips a page's code blocks, inline code, addresses and generated tables, which come from
programs. A line that contains `style: ignore` is exempt.
"""

from __future__ import annotations

import argparse
import ast
import bisect
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
# The patterns below are not prose, and the licence's text is fixed.
EXEMPT = ("scripts/check_style.py", "tests/unit/test_check_style.py", "LICENSE")
# Pages generated from strings in Python files.
FROM_PYTHON = ("docs/bad-input.md",)

# Words that have a plainer form: a pattern, and what to write instead.
NUMBER = r"\d[\d.,]*"
UNIT = r"ms|µs|us|s|tokens/s|GB/s|GiB|MiB|GB|MB|%"
COMPARATIVES = "longer|more|less|larger|smaller|faster|slower|later|earlier"
WORDS = {
    r"(?:un)?mend(?:s|ed|ing)?": "fix",
    r"nobody(?:'s)?|whoever|somebody(?:'s)?": "name the actor: user, client, process",
    rf"(?<!there )(?:is|are|was|were) no (?!(?:{COMPARATIVES})\b)\w+": "is not, has no",
    r"of (?:its|their|your|our|his|her|one's) own": "separate, private, or nothing",
    r"without a word": "without a message",
    r"(?:its|their) books": "state, records",
    r"as (?:it|they) comes?(?! (?:from|with|in)\b)": "unchanged",
    r"(?:where|than) (?:it|that) errs?": "name the case",
    r"excepted": "except",
    rf"{NUMBER} ?({UNIT}) for {NUMBER} ?\1(?!\w)": "write a ratio: 2.2x faster (104 s vs 234 s)",
    r"leases?|leased": "a GPU machine without a network",
    r"the seeds?'?s?|seeds? 0\d\d": "name the project or the report",
}
BANNED = [
    (re.compile(rf"(?<![\w-])(?:{pattern})(?![\w-])", re.IGNORECASE), advice)
    for pattern, advice in WORDS.items()
]
CITATION = re.compile(r"\bpatches\.md \d[\d.]*|(?<![\w*{}])[\w-]+\.md\b|\.\./shared\b")
ADDRESS = re.compile(r"https?://\S+")
NOT_PROSE = re.compile(r"`[^`]{1,300}`|\]\([^)]*\)")


class Problem(NamedTuple):
    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


def blank(match: re.Match[str]) -> str:
    """As many blanks as the match has characters, so that later positions stay the same."""
    return " " * len(match[0])


def scan(path: str, block: list[tuple[int, str]], shipped: frozenset[str]) -> Iterator[Problem]:
    """Problems of consecutive lines, scanned as one text: a phrase may cross the end of a line."""
    starts, text = [], ""
    for _, line in block:
        starts.append(len(text))
        text += line.strip() + " "
    text = ADDRESS.sub(blank, text)
    prose = NOT_PROSE.sub(blank, text)
    for pattern, advice in BANNED:
        for match in pattern.finditer(prose):
            number = block[bisect.bisect(starts, match.start()) - 1][0]
            yield Problem(path, number, f"'{match[0]}'; write: {advice}")
    for match in CITATION.finditer(text):
        if match[0] not in shipped:
            number = block[bisect.bisect(starts, match.start()) - 1][0]
            what = f"'{match[0]}' is not in the repository; cite a file that ships, or the source"
            yield Problem(path, number, what)


def blocks(lines: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Groups of consecutive lines with text. An empty line, or a gap in the numbers, ends a
    block.
    """
    block: list[tuple[int, str]] = []
    for number, line in lines:
        if block and (not line.strip() or number > block[-1][0] + 1):
            yield block
            block = []
        if line.strip():
            block.append((number, line))
    if block:
        yield block


def prose_of_page(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a Markdown page outside of code and generated tables, each with its number."""
    fenced = generated = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        generated = line.startswith("<!-- generated:") or (generated and line != "<!-- end -->")
        skipped = fenced or generated or IGNORE in line
        if not skipped and not line.startswith(("```", "    ", "<!--")):
            yield number, line


def page(path: str, text: str, shipped: frozenset[str]) -> Iterator[Problem]:
    """Problems of a Markdown page."""
    lines = list(prose_of_page(text))
    for number, line in lines:
        # A row of a table, a picture and a link cannot be broken.
        unbreakable = line.lstrip().startswith(("|", "![", "["))
        if len(line) > PROSE_COLUMNS and not unbreakable and not path.endswith("CHANGELOG.md"):
            yield Problem(path, number, f"{len(line)} columns; break prose at {PROSE_COLUMNS}")
    for block in blocks(lines):
        yield from scan(path, block, shipped)


def changelog(path: str, text: str) -> Iterator[Problem]:
    """Entries of the changelog: one line each, short enough to read at a glance."""
    entry = False
    for number, line in enumerate(text.splitlines(), 1):
        if entry and line.startswith("  "):
            yield Problem(path, number, "a second line of an entry; write one line for one change")
            continue
        entry = line.startswith("- ")
        if entry and len(line) > CHANGELOG_COLUMNS:
            what = f"{len(line)} columns; an entry has at most {CHANGELOG_COLUMNS}"
            yield Problem(path, number, what)


def plain(path: str, text: str, shipped: frozenset[str]) -> Iterator[Problem]:
    """Problems of shell, TOML, YAML, Dockerfiles and Makefiles: comments and strings alike."""
    lines = enumerate(text.splitlines(), 1)
    kept = [(number, line.strip().lstrip("#")) for number, line in lines if IGNORE not in line]
    for block in blocks(kept):
        yield from scan(path, block, shipped)


def sentences(text: str) -> Iterator[list[tuple[int, str]]]:
    """Blocks of lines: docstrings, other strings with a blank, and comments."""
    exempt = {number for number, line in enumerate(text.splitlines(), 1) if IGNORE in line}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            lines = enumerate(node.value.splitlines(), node.lineno)
            yield from blocks(each for each in lines if each[0] not in exempt)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [
        (token.start[0], token.string.lstrip("#: "))
        for token in tokens
        if token.type == tokenize.COMMENT and token.start[0] not in exempt
    ]
    yield from blocks(comments)


def python(path: str, text: str, shipped: frozenset[str]) -> Iterator[Problem]:
    """Problems of a Python file, sorted by line."""
    problems = (problem for block in sentences(text) for problem in scan(path, block, shipped))
    yield from sorted(problems, key=lambda problem: problem.line)


def check(path: str, text: str, shipped: frozenset[str]) -> list[Problem]:
    """All problems of one file, checked by its kind."""
    if path.endswith(".py"):
        return list(python(path, text, shipped))
    if not path.endswith(".md"):
        return list(plain(path, text, shipped))
    entries = changelog(path, text) if path.endswith("CHANGELOG.md") else ()
    return [*page(path, text, shipped), *entries]


def is_checked(path: str, with_python: bool) -> bool:
    """Whether the check covers this file."""
    name = Path(path).name
    if path in EXEMPT:
        return False
    if path.endswith(".py") or path in FROM_PYTHON:
        return with_python
    endings = (".md", ".sh", ".toml", ".yaml", ".hcl", ".container", ".service", ".patch")
    return name.endswith(endings) or name.startswith("Dockerfile") or name in ("Makefile", "run")


def tracked() -> list[str]:
    """Files of the repository, including new ones that git does not track yet."""
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [path for path in output.splitlines() if (ROOT / path).is_file()]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", help="files to check; default: all of the repository")
    parser.add_argument("--python", action="store_true", help="check Python files too")
    options = parser.parse_args()
    paths = tracked()
    shipped = frozenset(Path(path).name for path in paths if path.endswith(".md"))
    chosen = [path for path in options.files if path not in EXEMPT]
    if not options.files:
        chosen = [path for path in paths if is_checked(path, options.python)]
    problems = [
        problem for path in chosen for problem in check(path, (ROOT / path).read_text(), shipped)
    ]
    print(*problems, sep="\n", end="\n" if problems else "")
    if problems:
        print(f"{len(problems)} problems of style; see the top of {__file__}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

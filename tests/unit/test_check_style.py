"""scripts/check_style.py finds what the language rules forbid, and nothing else."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from nibble.machine.paths import root

PROGRAM = root() / "scripts" / "check_style.py"
SHIPPED = frozenset({"README.md", "patches.md", "canary.md"})


def _load():
    spec = importlib.util.spec_from_file_location("check_style", PROGRAM)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_style"] = module
    spec.loader.exec_module(module)
    return module


style = _load()


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], check=False, capture_output=True, text=True)


def found(path: str, text: str) -> list[str]:
    return [problem.what for problem in style.check(path, text, SHIPPED)]


@pytest.mark.parametrize(
    "sentence",
    [
        "The patch mends it.",
        "The defect is unmended.",
        "Nobody may enter.",
        "Nobody's port is taken.",
        "Whoever sets it owns the server.",
        "A value that is no address is refused.",
        "Each rank has a folder of its own.",
        "It took 104 s for 234 s.",
        "It served 500 tokens/s for 375 tokens/s.",
        "It ended without a word.",
        "One lease gives both figures.",
        "See peers.md 6.1.",
        "See patches.md 3.2.",
        "It reads ../shared/tools.",
        "What seed 003 saw.",
    ],
)
def test_a_forbidden_sentence_is_found_in_every_kind_of_file(sentence: str) -> None:
    assert len(found("docs/page.md", sentence)) == 1
    assert len(found("recipes/a.toml", f"# {sentence}")) == 1
    assert len(found("nibble/a.py", f'"""{sentence}"""')) == 1
    assert len(found("nibble/a.py", f"x = 1  # {sentence}")) == 1
    assert len(found("nibble/a.py", f'raise ValueError(f"{{x}}: {sentence}")')) == 1


@pytest.mark.parametrize(
    "sentence",
    [
        "It is no longer there, and there is no flag for it.",
        "It waits 10 s for 64 streams.",
        "[The table](patches.md) and README.md have more.",
        "An amendment recommends a release, please.",
        "A random seed of 0.",
        "`nobody` is a user of the system.",
        "See https://example.org/peers.md for the text.",
    ],
)
def test_a_plain_sentence_passes(sentence: str) -> None:
    assert found("docs/page.md", sentence) == []


def test_a_phrase_is_found_over_the_end_of_a_line() -> None:
    assert found("docs/page.md", "Each has a folder of\nits own.") != []
    assert found("a.sh", "# Each has a folder of\n# its own.\n") != []
    assert found("a.py", '"""Each has a folder of\n    its own.\n"""') != []
    assert found("a.py", "x = 1\n# Each has a folder of\n# its own.\n") != []


def test_prose_is_broken_at_100_columns() -> None:
    long = "word " * 21
    assert found("docs/page.md", long.strip()) == ["104 columns; break prose at 100"]
    assert found("docs/page.md", f"```\n{long}\n```\n| {long} |\n    {long}") == []


def test_generated_tables_of_a_page_are_left_to_their_programs() -> None:
    page = "<!-- generated: options -->\nnobody\n<!-- end -->\nnobody\n"
    assert [problem.line for problem in style.check("docs/page.md", page, SHIPPED)] == [4]


def test_an_entry_of_the_changelog_is_one_short_line() -> None:
    assert found("CHANGELOG.md", "- " + "x" * 118) == ["120 columns; an entry has at most 119"]
    assert found("CHANGELOG.md", "- one\n  two\n- three") == [
        "a second line of an entry; write one line for one change"
    ]


def test_a_marked_line_is_exempt() -> None:
    assert found("a.sh", "# nobody style: ignore") == []
    assert found("a.py", "x = 'is no address'  # style: ignore") == []


def test_the_program_names_file_line_and_problem(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Fine.\nNobody.\n")
    done = subprocess.run(
        [sys.executable, PROGRAM, page], check=False, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stdout.startswith(f"{page}:2: 'Nobody'; write: name the actor")


def test_what_is_exempt_stays_so_where_it_is_named() -> None:
    words = [sys.executable, PROGRAM, "--python", "tests/unit/test_check_style.py"]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")

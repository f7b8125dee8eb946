"""The documentation says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nibble.cli.app import verbs
from nibble.cli.docs import GENERATED, pages, update
from nibble.machine.paths import root

PAGES = pages()


def test_generated_tables_are_current() -> None:
    assert update(check=True) == []


def test_every_generated_table_stands_somewhere() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert set(re.findall(r"^(?:<!--|#) generated: ([a-z-]+)", text, re.M)) == set(GENERATED)


def test_every_verb_is_in_the_table_of_verbs() -> None:
    table = root().joinpath("docs/operations.md").read_text().partition("| verb |")[2]
    rows = table.partition("\n\n")[0]
    assert [verb for verb in verbs() if not re.search(rf"`{verb}\b", rows)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#|mailto:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target

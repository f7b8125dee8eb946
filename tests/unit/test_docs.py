"""The documentation says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nibble.cli.docs import GENERATED, pages, update

PAGES = pages()


def test_generated_tables_are_current() -> None:
    assert update(check=True) == []


def test_every_generated_table_stands_somewhere() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert set(re.findall(r"^(?:<!--|#) generated: ([a-z-]+)", text, re.M)) == set(GENERATED)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#|mailto:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target

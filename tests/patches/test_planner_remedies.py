"""Rows whose answer is nibble's plan: without the entry of rules/ or targets/ that the row names, its remedy fails."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from nibble.patching import run
from nibble.patching.status import installed_tree
from nibble.paths import root
from nibble.targets import load_target

pytestmark = pytest.mark.vllm

# probe, file, what to take out of it
ENTRIES = [
    ("n11_b12x_scales", "rules/backends.toml", r'\[\[rule\]\]\nid = "flashinfer-b12x-moe".*?(?=\n\[\[rule)'),
    (
        "n26_b12x_not_automatic",
        "rules/backends.toml",
        r'\[\[rule\]\]\nid = "b12x-unmeasured".*?(?=\n\[\[rule)',
    ),
    ("n13_gb10_batch_defaults", "targets/gb10.toml", r"\[args\.max-num-batched-tokens\].*?(?=\n\[)"),
    ("n13_gb10_batch_defaults", "targets/gb10.toml", r"\[args\.max-num-seqs\].*?(?=\n\[)"),
    ("n14_gb10_free_memory", "targets/gb10.toml", r"\[args\.gpu-memory-utilization\].*?(?=\n\[)"),
]
PROBES = {name: run.load(name) for name, *_ in ENTRIES}


@pytest.fixture
def own_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of rules/ and targets/ that plans are made from."""
    for name in ("rules", "targets"):
        shutil.copytree(root() / name, tmp_path / name)
    monkeypatch.setenv("NIBBLE_ROOT", str(tmp_path))
    load_target.cache_clear()
    yield tmp_path
    load_target.cache_clear()


@pytest.mark.parametrize("name", sorted(PROBES))
def test_the_plan_mends_the_row(name: str, own_root: Path) -> None:
    finding = PROBES[name].remedy(installed_tree())
    assert finding.state == "sound", finding.detail


@pytest.mark.parametrize(("name", "file", "entry"), ENTRIES)
def test_without_its_entry_the_remedy_fails(name: str, file: str, entry: str, own_root: Path) -> None:
    text, removed = re.subn(entry, "", (own_root / file).read_text(), flags=re.DOTALL)
    assert removed == 1
    (own_root / file).write_text(text)
    finding = PROBES[name].remedy(installed_tree())
    assert finding.state == "defect", finding.detail

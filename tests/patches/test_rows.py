"""docs/patches.md is true: each probe finds in each pristine release what its row says, and each
fix is the reason why its probe passes.
"""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import pytest

from nibble.engine.patching.apply import apply_series, revert_series
from nibble.engine.patching.run import Result, rows, run
from nibble.engine.patching.series import load_series
from nibble.engine.patching.status import Line, look
from nibble.engine.patching.tree import Tree, open_tree
from nibble.machine.paths import root
from tests.support.changes import PATCHING
from tests.support.releases.separating import halves, subsets
from tests.support.releases.trees import copy_of, patched, pristine, source_tree

pytestmark = pytest.mark.vllm
ROWS = rows()
if_an_answer_changed = pytest.mark.when_changed(
    *PATCHING, "rules", "targets", "kernels", "nibble/plan", "nibble/engine"
)
CURRENT = "0.32.0"
EXPECTED = [(name, version) for name, row in ROWS.items() for version in row.expect]
PATCHES = [patch.name for patch in load_series("vllm").patches]
# Which patches are left out, and of which the probes are run. Those of FlashInfer's pretend to be
# GPUs and take most of the time:
# patches are told apart within two groups, each time without the whole other group, which no probe
# of this one may need.
# Halves of a group show that every probe fails without its patch and with it does not; `subsets`,
# that no other patch of the
# half is the reason.
FLASHINFER = [name for name in PATCHES if name.startswith("flashinfer")]
OTHERS = [name for name in PATCHES if name not in FLASHINFER]
LEFT_OUT = [
    ((*half, *other), group)
    for group, other in ((FLASHINFER, OTHERS), (OTHERS, FLASHINFER))
    for half in halves(group)
]
SEPARATING = [((*subset, *FLASHINFER), OTHERS) for subset in subsets(OTHERS)]
SEED_ROWS = [*(str(number) for number in range(1, 19)), "13b", "13c"]
LIVE_ROWS = [f"N{number}" for number in range(1, 29)]


@cache
def found(version: str) -> dict[str, Result]:
    """What the probes with an expectation for a release find in it: in its wheel, and where that
    cannot answer in its sources.
    """
    wanted = [name for name, row in ROWS.items() if version in row.expect]
    results = {result.probe: result for result in run(open_tree(pristine(version)), wanted)}
    silent = [n for n, r in results.items() if r.finding and r.finding.state == "not applicable"]
    silent = [name for name in silent if ROWS[name].expect[version] != "not applicable"]
    if silent:
        results |= {result.probe: result for result in run(open_tree(source_tree(version)), silent)}
    return results


@pytest.mark.when_changed(*PATCHING)
@pytest.mark.parametrize(("name", "version"), EXPECTED)
def test_probe_finds_in_the_pristine_release_what_its_row_says(name: str, version: str) -> None:
    result = found(version)[name]
    assert result.finding is not None, result.error
    assert result.finding.state == ROWS[name].expect[version], result.finding.detail


@cache
def table_of_the_patched_release(folder: Path) -> dict[str, Line]:
    return {line.id: line for line in look(open_tree(patched(folder)))}


@pytest.fixture
def patched_table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Line]:
    return table_of_the_patched_release(tmp_path_factory.getbasetemp() / "patched")


@if_an_answer_changed
def test_every_row_of_the_patched_release_is_in_order(patched_table: dict[str, Line]) -> None:
    wrong = {
        line.id: (line.word, line.detail) for line in patched_table.values() if not line.in_order
    }
    assert not wrong


@if_an_answer_changed
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.fix])
def test_every_fix_is_in_place_in_the_patched_release(
    name: str, patched_table: dict[str, Line]
) -> None:
    row = ROWS[name]
    state = row.expect.get(CURRENT, "not applicable")
    allowed = (
        {"applied"} if state == "defect" else {"fixed upstream", "not needed", "not applicable"}
    )
    line = patched_table[row.id]
    if line.word == "not applicable" and state == "defect":  # a question for the sources
        allowed = {"not applicable"}
        assert found(CURRENT)[name].finding
    assert line.word in allowed, line.detail


@pytest.mark.when_changed(*PATCHING)
@pytest.mark.parametrize(
    ("left_out", "group"),
    [*LEFT_OUT, *(pytest.param(*one, marks=pytest.mark.slow) for one in SEPARATING)],
    ids=["+".join(names) for names, _ in (*LEFT_OUT, *SEPARATING)],
)
def test_without_a_patch_exactly_its_probes_fail(
    left_out: tuple[str, ...], group: list[str], tmp_path: Path
) -> None:
    patches = {
        name: row.fix.at.removeprefix("vllm/")
        for name, row in ROWS.items()
        if row.fix and row.fix.kind == "patch"
    }
    looked_at = [name for name, patch in patches.items() if patch in group]
    lines = look(open_tree(patched(tmp_path / "tree", without=left_out)), looked_at)
    assert {line.probe for line in lines if not line.in_order} == {
        name for name in looked_at if patches[name] in left_out
    }


def test_every_patch_has_a_probe_and_is_left_out_somewhere() -> None:
    mended = {
        row.fix.at.removeprefix("vllm/")
        for row in ROWS.values()
        if row.fix and row.fix.kind == "patch"
    }
    assert mended == set(PATCHES)
    for patch in PATCHES:
        runs = [patch in left_out for left_out, group in LEFT_OUT if patch in group]
        assert True in runs and False in runs


def test_both_tables_of_the_reference_are_there() -> None:
    ids = {row.id for row in ROWS.values()}
    assert set(SEED_ROWS) <= ids and set(LIVE_ROWS) <= ids
    assert len(ids) == len(ROWS)


def test_every_patch_names_the_probe_that_tells_when_it_can_go() -> None:
    for patch in load_series("vllm").patches:
        named = [name for name in ROWS if name in patch.headers["X-Remove-When"]]
        assert named, f"{patch.name}: X-Remove-When names no probe"
        assert all(ROWS[name].fix and ROWS[name].fix.at == f"vllm/{patch.name}" for name in named)  # type: ignore[union-attr]


@pytest.mark.parametrize("layout", ["wheel", "source"])
def test_the_series_applies_to_both_layouts_and_reverts_byte_for_byte(
    layout: str, tmp_path: Path
) -> None:
    origin = pristine(CURRENT) if layout == "wheel" else source_tree(CURRENT)
    tree = open_tree(copy_of(origin, tmp_path / "tree"))
    series = load_series("vllm")
    assert len(apply_series(tree, series)) >= len(PATCHES) - 1
    touched = sorted(series.pristine)
    assert all(
        tree.path(n).read_bytes() != (origin / n).read_bytes() for n in touched if tree.has(n)
    )
    revert_series(tree, series)
    assert all(
        tree.path(n).read_bytes() == (origin / n).read_bytes() for n in touched if tree.has(n)
    )


@pytest.mark.when_changed(*PATCHING)
def test_the_series_is_what_git_apply_makes_of_it(tmp_path: Path) -> None:
    """The same bytes as `git apply` of the whole series at once, on a copy of the touched files."""
    series = load_series("vllm")
    for name in series.pristine:
        place = tmp_path / "git" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes((source_tree(CURRENT) / name).read_bytes())
    text = "".join((root() / f"patches/vllm/{name}.patch").read_text() for name in PATCHES)
    subprocess.run(["git", "apply", "-"], input=text, text=True, cwd=tmp_path / "git", check=True)
    tree = Tree(patched(tmp_path / "tree", tree=source_tree(CURRENT)), "source", CURRENT)
    assert all(
        tree.path(name).read_bytes() == (tmp_path / "git" / name).read_bytes()
        for name in series.pristine
    )

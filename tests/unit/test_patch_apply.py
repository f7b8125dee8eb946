"""A tree is either as it was or patched as a whole, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nibble.engine.patching import swap
from nibble.engine.patching.apply import (
    RECORD_FOLDER,
    apply_series,
    patch_states,
    revert_series,
    unit,
)
from nibble.engine.patching.series import Series, load_series
from nibble.engine.patching.tree import Tree, open_tree
from nibble.errors import ExitCode, NibbleError
from tests.support.changes import PATCHING
from tests.support.releases import patch_series


@pytest.fixture(params=["wheel", "source"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Tree:
    return open_tree(patch_series.make_tree(tmp_path / "tree", source=request.param == "source"))


@pytest.fixture
def series(tmp_path: Path) -> Series:
    return load_series("vllm", patch_series.make_series(tmp_path / "series"))


def test_apply_changes_exactly_the_lines_of_the_patches(tree: Tree, series: Series) -> None:
    before = patch_series.contents(tree.root)
    assert apply_series(tree, series) == ["first", "second"]
    after = patch_series.contents(tree.root)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"vllm/one.py", "vllm/deep/two.py"} and before.keys() == after.keys()
    assert "one = 'three'" in tree.text("vllm/one.py") and "one = 'thirty'" in tree.text(
        "vllm/one.py"
    )
    assert set(patch_states(tree, series).values()) == {"applied"}


def test_apply_twice_changes_nothing_the_second_time(tree: Tree, series: Series) -> None:
    apply_series(tree, series)
    inode, after = unit(tree).stat().st_ino, patch_series.contents(tree.root)
    assert apply_series(tree, series) == []
    assert (unit(tree).stat().st_ino, patch_series.contents(tree.root)) == (inode, after)


def test_revert_restores_every_byte_and_leaves_nothing(tree: Tree, series: Series) -> None:
    before = patch_series.contents(tree.root)
    apply_series(tree, series)
    assert revert_series(tree, series) == ["first", "second"]
    assert patch_series.contents(tree.root) == before
    assert not (unit(tree) / RECORD_FOLDER).exists()
    assert [path.name for path in tree.root.parent.iterdir() if "nibble" in path.name] == []
    assert revert_series(tree, series) == []


def test_a_changed_series_replaces_the_one_that_was_applied(
    tree: Tree, series: Series, tmp_path: Path
) -> None:
    before = patch_series.contents(tree.root)
    apply_series(tree, series)
    only_second = replace(series, patches=series.patches[1:])
    assert apply_series(tree, only_second) == ["second"]
    assert tree.text("vllm/deep/two.py") == patch_series.FILES["vllm/deep/two.py"]
    assert "one = 3\n" in tree.text("vllm/one.py") and "thirty" in tree.text("vllm/one.py")
    revert_series(tree, series)
    assert patch_series.contents(tree.root) == before


def test_a_fresh_installation_over_a_patched_one_is_patched_again(
    tree: Tree, series: Series
) -> None:
    apply_series(tree, series)
    for name in (
        "vllm/one.py",
        "vllm/deep/two.py",
    ):  # what pip writes; the record stays, pip does not know it
        tree.path(name).unlink()
        tree.path(name).write_text(patch_series.FILES[name])
    assert set(patch_states(tree, series).values()) == {"not applied"}
    assert apply_series(tree, series) == ["first", "second"]
    assert "thirty" in tree.text("vllm/one.py")


def test_patches_of_compiled_sources_are_for_the_source_layout_only(tmp_path: Path) -> None:
    changes = patch_series.CHANGES | {
        "kernel": {"csrc/kernel.cu": ("// kernel 7\n", "// kernel seven\n")}
    }
    series = load_series("vllm", patch_series.make_series(tmp_path / "series", changes))
    wheel = open_tree(patch_series.make_tree(tmp_path / "wheel"))
    source = open_tree(patch_series.make_tree(tmp_path / "source", source=True))
    assert apply_series(wheel, series) == ["first", "second"]
    assert patch_states(wheel, series)["kernel"] == "not applicable"
    assert apply_series(source, series) == ["first", "second", "kernel"]
    assert "// kernel seven" in source.text("csrc/kernel.cu")


def test_a_file_linked_from_elsewhere_keeps_its_bytes(
    tree: Tree, series: Series, tmp_path: Path
) -> None:
    os.link(tree.path("vllm/one.py"), tmp_path / "elsewhere.py")
    apply_series(tree, series)
    assert (tmp_path / "elsewhere.py").read_text() == patch_series.FILES["vllm/one.py"]


def test_file_modes_are_kept(tree: Tree, series: Series) -> None:
    tree.path("vllm/one.py").chmod(0o640)
    apply_series(tree, series)
    assert tree.path("vllm/one.py").stat().st_mode & 0o777 == 0o640


# Killed at any point

IF_PATCHING_CHANGED = pytest.mark.when_changed(*PATCHING, "tests/unit/test_patch_apply.py")


def killed_at(event: int, work: Callable[[], object]) -> bool:
    """Run `work` in a child that dies by SIGKILL at its n-th audited operation (open, rename,
    link, mkdir, ctypes…).
    """
    child = os.fork()
    if child == 0:
        seen = 0

        def count(name: str, _: object) -> None:
            nonlocal seen
            seen += 1
            if seen == event:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize(
    ("tree", "exchange"),
    [
        pytest.param("wheel", True, id="wheel-renameat2"),
        pytest.param("source", False, id="source-two renames", marks=IF_PATCHING_CHANGED),
        pytest.param("source", True, id="source-renameat2", marks=IF_PATCHING_CHANGED),
        pytest.param("wheel", False, id="wheel-two renames", marks=IF_PATCHING_CHANGED),
    ],
    indirect=["tree"],
)
def test_killed_at_any_point_the_tree_is_as_before_or_patched(
    tree: Tree, series: Series, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:  # a file system that cannot exchange two folders
        monkeypatch.setattr(swap, "RENAME_EXCHANGE", 1 << 10)
    before = patch_series.contents(tree.root)
    apply_series(tree, series)
    after = patch_series.contents(tree.root)
    revert_series(tree, series)
    for work, states in ((apply_series, (before, after)), (revert_series, (after, before))):
        event, seen = 1, set()
        while killed_at(event, lambda work=work: work(tree, series)):
            if not exchange and not unit(tree).exists():
                swap.recover(unit(tree))  # what every next command does first
            found = patch_series.contents(tree.root)
            assert found in states, (
                f"half done after {work.__name__} was killed at operation {event}"
            )
            seen.add(states.index(found))
            work(tree, series)
            assert patch_series.contents(tree.root) == states[1]
            assert not list(unit(tree).parent.glob("*.nibble-*"))
            (revert_series if work is apply_series else apply_series)(tree, series)
            event += 1
        assert seen == {0, 1} and event > 20, f"only {event} operations, outcomes {seen}"
        work(tree, series)


def test_two_at_once_leave_one_whole_result(tree: Tree, series: Series, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\nfrom nibble.engine.patching.apply import"
        " apply_series; from nibble.engine.patching.series import load_series\nfrom"
        " nibble.engine.patching.tree import"
        " open_tree\nprint(len(apply_series(open_tree(Path(sys.argv[1])), load_series('vllm',"
        " Path(sys.argv[2])))))"
    )
    words = [sys.executable, "-c", code, str(tree.root), str(tmp_path / "series")]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert sorted(child.communicate()[0].strip() for child in both) == ["0", "2"]
    assert set(patch_states(tree, series).values()) == {"applied"}


# Bad input


def refused(work: Callable[[], object], *words: str) -> None:
    with pytest.raises(NibbleError) as caught:
        work()
    assert caught.value.code is ExitCode.VERIFY and "\n" not in caught.value.line()
    for word in words:
        assert word in caught.value.line()


def test_a_locally_modified_file_is_refused_and_the_tree_stays(tree: Tree, series: Series) -> None:
    with tree.path("vllm/deep/two.py").open("a") as file:
        file.write("mine = True\n")
    before = patch_series.contents(tree.root)
    refused(lambda: apply_series(tree, series), "vllm/deep/two.py", "neither")
    assert patch_series.contents(tree.root) == before


def test_a_patched_file_modified_afterwards_is_refused_by_apply_and_revert(
    tree: Tree, series: Series
) -> None:
    apply_series(tree, series)
    with tree.path("vllm/one.py").open("a") as file:
        file.write("mine = True\n")
    before = patch_series.contents(tree.root)
    refused(lambda: apply_series(tree, series), "vllm/one.py")
    refused(lambda: revert_series(tree, series), "vllm/one.py")
    assert patch_series.contents(tree.root) == before


def test_another_release_is_refused_and_the_tree_stays(tmp_path: Path, series: Series) -> None:
    tree = open_tree(patch_series.make_tree(tmp_path / "other", version="0.33.0"))
    before = patch_series.contents(tree.root)
    refused(lambda: apply_series(tree, series), "0.33.0", "expected vllm 0.32.0")
    assert patch_series.contents(tree.root) == before


def test_a_tree_that_cannot_be_written_is_refused_and_stays(
    tree: Tree, series: Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = patch_series.contents(tree.root)

    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    # Root may write anywhere: the image tests use a real one
    monkeypatch.setattr(swap.shutil, "copytree", read_only)
    refused(lambda: apply_series(tree, series), "Read-only file system")
    assert patch_series.contents(tree.root) == before


def test_a_folder_without_vllm_is_refused(tmp_path: Path) -> None:
    refused(lambda: open_tree(tmp_path), "does not contain vLLM", "--root")


def test_a_patch_that_does_not_fit_leaves_the_tree(tree: Tree, tmp_path: Path) -> None:
    changes = patch_series.CHANGES | {"third": {"vllm/one.py": ("one = 30\n", "one = 'XXX'\n")}}
    series = load_series("vllm", patch_series.make_series(tmp_path / "clash", changes))
    before = patch_series.contents(tree.root)
    refused(lambda: apply_series(tree, series), "third.patch does not apply")
    assert patch_series.contents(tree.root) == before


def break_series(folder: Path, how: str) -> None:
    series = folder / "series"
    patch = folder / "first.patch"
    if how == "missing patch file":
        patch.unlink()
    elif how == "missing series":
        series.unlink()
    elif how == "unlisted patch":
        series.write_text("second.patch\n")
    elif how == "listed twice":
        series.write_text(series.read_text() + "first.patch\n")
    elif how == "missing header":
        patch.write_text(patch.read_text().replace("X-Remove-When: never\n", ""))
    elif how == "unknown reason":
        patch.write_text(patch.read_text().replace("X-Reason: ours", "X-Reason: because"))
    elif how == "no diff":
        patch.write_text(patch_series.HEADER.format(name="first"))
    elif how == "no hash":
        (folder / "pristine.sha256").write_text("")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("missing patch file", "lists first.patch, which cannot be read"),
        ("missing series", "cannot read"),
        ("unlisted patch", "first.patch is not in"),
        ("listed twice", "lists first.patch twice"),
        ("missing header", "has no X-Remove-When"),
        ("unknown reason", "X-Reason 'because'"),
        ("no diff", "not a patch for nibble"),
        ("no hash", "lacks vllm/"),
    ],
)
def test_a_broken_series_is_refused_by_name(tmp_path: Path, how: str, says: str) -> None:
    folder = patch_series.make_series(tmp_path / "series")
    break_series(folder, how)
    refused(lambda: load_series("vllm", folder), says)

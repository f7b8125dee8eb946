"""Which files count as changed, in a repository of git."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import changes

Git = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path) -> Git:
    """A repository with two commits on its main branch."""

    def call(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        command = ["git", *who, *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    call("init", "--quiet", "--initial-branch", "main")
    for name in ("first", "second"):
        write(tmp_path, f"patches/{name}.py")
        call("add", ".")
        call("commit", "--quiet", "--message", name)
    return call


def write(checkout: Path, name: str) -> None:
    (checkout / name).parent.mkdir(exist_ok=True)
    (checkout / name).write_text(name)


def found(checkout: Path, since: str = "") -> set[str] | None:
    changes.changed_files.cache_clear()
    files = changes.changed_files(checkout, since)
    return None if files is None else set(files)


def test_on_the_main_branch_it_is_the_last_commit_and_what_is_not_committed(
    git: Git, tmp_path: Path
) -> None:
    assert found(tmp_path) == {"patches/second.py"}
    write(tmp_path, "docs/new.md")
    assert found(tmp_path) == {"patches/second.py", "docs/new.md"}


def test_on_another_branch_it_is_all_that_the_main_one_does_not_have(
    git: Git, tmp_path: Path
) -> None:
    git("switch", "--quiet", "--create", "work")
    for name in ("a", "b"):
        write(tmp_path, f"docs/{name}.md")
        git("add", ".")
        git("commit", "--quiet", "--message", name)
    assert found(tmp_path) == {"docs/a.md", "docs/b.md"}


def test_a_commit_that_is_given_counts(git: Git, tmp_path: Path) -> None:
    write(tmp_path, "patches/first.py")
    (tmp_path / "patches/first.py").write_text("other")
    assert found(tmp_path, "HEAD") == {"patches/first.py"}


def test_a_history_of_one_commit_and_a_folder_without_git_say_nothing(
    git: Git, tmp_path: Path
) -> None:
    subprocess.run(
        ["git", "clone", "--quiet", "--depth", "1", f"file://{tmp_path}", "shallow"],
        cwd=tmp_path,
        check=True,
    )
    assert found(tmp_path / "shallow") is None
    assert found(tmp_path.parent) is None


@pytest.mark.parametrize(
    ("files", "paths", "is_changed"),
    [
        ({"patches/a.py"}, ("patches", "nibble/plan"), True),
        ({"nibble/plan/plan.py"}, ("patches", "nibble/plan"), True),
        ({"Makefile"}, ("Makefile",), True),
        ({"patches2/a.py", "docs/patches"}, ("patches",), False),
        (set(), ("patches",), False),
        (None, ("patches",), True),
    ],
)
def test_a_folder_counts_with_all_below_it(
    files: set[str] | None,
    paths: tuple[str, ...],
    is_changed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(changes, "changed_files", lambda checkout, since: files)
    assert changes.is_changed(*paths) is is_changed


def test_the_page_of_tests_names_every_file_of_which_make_test_leaves_something_out() -> None:
    page = (changes.ROOT / "docs/testing.md").read_text()
    left_out = [
        path
        for path in (changes.ROOT / "tests").glob("*/test_*.py")
        if re.search(r"mark\.(slow|when_changed)\b", path.read_text())
    ]
    assert len(left_out) > 30
    assert "`tests/cluster`" in page  # as a whole
    assert [
        path.name for path in left_out if path.name not in page and path.parent.name != "cluster"
    ] == []


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest refuses the second one, but only in a run that collects both."""
    names = Counter(path.name for path in (changes.ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []

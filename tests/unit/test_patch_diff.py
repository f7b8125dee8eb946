"""Strict unified diffs, compared with what git makes of them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from nibble.engine.patching.diff import DiffError, apply, parse

BEFORE = "".join(f"line {number}\n" for number in range(1, 31))
DIFF = """\
Description: a header that is not read
--- a/vllm/file.py
+++ b/vllm/file.py
@@ -4,3 +4,4 @@
 line 4
-line 5
+line five
+line five and a half
 line 6
@@ -20,3 +21,2 @@
 line 20
-line 21
 line 22
"""


def git_apply(folder: Path, before: str, diff: str) -> str | None:
    """What `git apply` makes of it; None where it refuses."""
    (folder / "vllm").mkdir(exist_ok=True)
    (folder / "vllm/file.py").write_text(before)
    done = subprocess.run(
        ["git", "apply", "-"], input=diff, text=True, cwd=folder, capture_output=True, check=False
    )
    return (folder / "vllm/file.py").read_text() if done.returncode == 0 else None


def strict_apply(before: str, diff: str) -> str | None:
    try:
        (change,) = parse(diff)
        return apply(before, change)
    except DiffError:
        return None


@pytest.mark.parametrize(
    "before",
    [
        BEFORE,
        "an inserted line\n" + BEFORE,
        "".join(f"early {n}\n" for n in range(9)) + BEFORE,
        BEFORE.replace("line 4\n", "line four\n"),
        BEFORE.replace("line 21\n", ""),
        BEFORE + BEFORE,
    ],
    ids=[
        "as made",
        "moved by one",
        "moved by nine",
        "other context",
        "already half done",
        "twice there",
    ],
)
def test_result_is_that_of_git_apply(tmp_path: Path, before: str) -> None:
    assert strict_apply(before, DIFF) == git_apply(tmp_path, before, DIFF)


def test_last_line_without_line_end_is_kept_as_git_keeps_it(tmp_path: Path) -> None:
    before = "one\ntwo"
    diff = (
        "--- a/vllm/file.py\n+++ b/vllm/file.py\n@@ -1,2 +1,2 @@\n one\n-two\n\\ No newline at end"
        " of file\n+2\n\\ No newline at end of file\n"
    )
    assert strict_apply(before, diff) == git_apply(tmp_path, before, diff) == "one\n2"


@pytest.mark.parametrize(
    ("diff", "says"),
    [
        ("no diff at all\n", "no diff"),
        ("--- a/x\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n", "not lines of one file"),
        ("--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+b\n", "not lines of one file"),
        ("--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-a\n+b\n", "leaves the tree"),
        ("--- a/x\n+++ b/x\n", "no hunk"),
        (
            "--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n a\n-b\n+c\n",
            "shorter or longer than its header says",
        ),
    ],
)
def test_what_is_no_patch_of_lines_is_refused(diff: str, says: str) -> None:
    with pytest.raises(DiffError, match=says):
        parse(diff)

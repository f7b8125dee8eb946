"""Rows about `nibble patches`: trees and series that are damaged."""

from __future__ import annotations

import os
from collections.abc import Callable

from tests.support.bad_input.case import Case, Place, Row, row
from tests.support.releases.patch_series import make_series, make_tree

APPLY = ("patches", "apply", "--root", "{tmp}/tree")
ROOT = {"NIBBLE_ROOT": "{tmp}/root"}


def _case(
    change: Callable[[Place], object] | None = None,
    other_user: bool = False,
    version: str = "0.32.0",
) -> Case:
    """A tree and a series in the case's folder, then the change that makes them bad input."""

    def prepare(place: Place) -> None:
        make_tree(place.tmp / "tree", version=version)
        make_series(place.tmp / "root" / "patches" / "vllm")
        if change:
            change(place)

    return Case(APPLY, ROOT, prepare, other_user)


def _own(place: Place) -> None:
    """Readable by everybody, writable by root alone."""
    for path in [place.tmp / "tree", *(place.tmp / "tree").rglob("*")]:
        os.chmod(path, 0o755 if path.is_dir() else 0o644)


def _modify(place: Place) -> None:
    (place.tmp / "tree/vllm/one.py").write_text("mine = True\n")


def _remove_patch(place: Place) -> None:
    (place.tmp / "root/patches/vllm/first.patch").unlink()


def _remove_series(place: Place) -> None:
    (place.tmp / "root/patches/vllm/series").unlink()


def _unlist(place: Place) -> None:
    (place.tmp / "root/patches/vllm/series").write_text("second.patch\n")


def patch_rows() -> list[Row]:
    """One row for each; the tree stays as it was (tests/unit/test_patch_apply.py)."""
    return [
        row(
            "patches-other-release",
            "`nibble patches apply` on another release of vLLM",
            6,
            "…/tree has vllm 0.33.0, but patches/vllm needs 0.32.0; expected vllm 0.32.0;"
            " install that release, or run `nibble patches status` to see what this one needs",
            _case(version="0.33.0"),
        ),
        row(
            "patches-modified-file",
            "`nibble patches apply` where another program changed a file to patch",
            6,
            "vllm/one.py in …/tree is neither vllm 0.32.0's file nor a file that nibble patched;"
            " expected sha256 …, found …; install vllm again (`make clean setup`), or undo the"
            " change",
            _case(_modify),
        ),
        row(
            "patches-read-only",
            "`nibble patches apply` in a site-packages this user may not write to",
            6,
            "cannot change …/tree (Permission denied); expected a folder that this user can"
            " write; run it as the folder's owner, or patch during the image build",
            _case(_own, other_user=True),
        ),
        row(
            "patches-missing-file",
            "a patch that the series lists and that is not there",
            6,
            "…/patches/vllm/series lists first.patch, which cannot be read (No such file or"
            " directory); expected a file for every entry; restore it from the repository",
            _case(_remove_patch),
        ),
        row(
            "patches-unlisted",
            "a patch file that the series does not list",
            6,
            "…/patches/vllm/first.patch is not in …/patches/vllm/series; expected a line for"
            " every patch; list or remove it",
            _case(_unlist),
        ),
        row(
            "patches-no-series",
            "no series",
            6,
            "cannot read …/patches/vllm/series (No such file or directory); expected a list of"
            " patches; restore it from the repository",
            _case(_remove_series),
        ),
        row(
            "patches-no-tree",
            "`--root` with a folder that holds no vLLM",
            6,
            "… does not contain vLLM; expected a site-packages folder or vLLM's unpacked source,"
            " with"
            " vllm/__init__.py in it; name it with --root",
            Case(("patches", "apply", "--root", "{tmp}")),
        ),
    ]

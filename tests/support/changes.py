"""What a change touches: some tests run in `make test` only where their folders changed."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

from tests.support.paths import ROOT

# Folders whose tests take minutes and give the same answers as long as nothing below them changes.
PATCHING = (
    "patches",
    "nibble/engine/patching",
    "nibble/engine/fatbin.py",
    "nibble/engine/gpu_code.py",
    "requirements",
    "tests/patches",
    "tests/support/releases",
)
OPERATORS = (
    "kernels",
    "nibble/engine/plugin",
    "requirements",
    "tests/kernels",
    "tests/support/kernels",
    "tests/support/in_vllm",
)
CONTAINERS = (
    "docker",
    "build.sh",
    "entrypoint.sh",
    "setup",
    "requirements",
    "tests/image",
    "tests/support/docker",
)
SINCE = "TEST_SINCE"  # a commit, for a CI that knows what it tested last


def is_changed(*paths: str) -> bool:
    """Whether a file under one of these paths of the checkout changed; yes where git cannot say."""
    files = changed_files(ROOT, os.environ.get(SINCE, ""))
    return files is None or any(
        file == path or file.startswith(f"{path}/") for file in files for path in paths
    )


@functools.cache
def changed_files(checkout: Path, since: str = "") -> frozenset[str] | None:
    """Files that differ from commit `since`, committed or not; None where git cannot say.

    Without `since`: what a branch has beyond the main one, and on the main one the last commit.
    """
    differing = _git(checkout, "diff", "--name-only", since or _base(checkout))
    untracked = _git(checkout, "ls-files", "--others", "--exclude-standard")
    if differing is None or untracked is None:
        return None
    return frozenset((differing + untracked).splitlines())


def _base(checkout: Path) -> str:
    head = _git(checkout, "rev-parse", "HEAD")
    for main in ("origin/HEAD", "main"):
        base = _git(checkout, "merge-base", "HEAD", main)
        if base and base != head:
            return base.strip()
    return "HEAD~1"


def _git(checkout: Path, *words: str) -> str | None:
    """What a command of git prints; None where it fails."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=checkout, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None

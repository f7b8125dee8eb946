"""Runs a program in a process that has vLLM and nibble's operators; its findings as plain data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT, python_path


def findings(installed: Path, words: list[str], cases: list[Any]) -> list[Any]:
    """For each of `cases`, JSON on stdin, the program prints `FOUND` and JSON on one line.

    `words` follow Python's name; `installed` has the operators.
    """
    done = subprocess.run(
        [sys.executable, *words],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": python_path(installed, ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert len(lines) == len(cases), done.stdout[-3000:]
    return [json.loads(line.removeprefix("FOUND ")) for line in lines]

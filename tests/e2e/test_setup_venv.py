"""The virtual environment on a Python without ensurepip; takes virtualenv from the package index."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from nibble.paths import root


def test_an_environment_is_made_without_ensurepip_where_an_outside_pip_can_help(tmp_path: Path) -> None:
    # What Debian without python3-venv does: the module is there, ensurepip is not.
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "ensurepip.py").write_text("raise ImportError('split off')\n")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; "
        "from setup import venv; venv.make(Path(sys.argv[2]))"
    )
    environ = dict(os.environ) | {"PYTHONPATH": str(blocked)}
    result = subprocess.run(
        [sys.executable, "-c", code, str(root()), str(tmp_path / "v")],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    pip = subprocess.run(
        [str(tmp_path / "v/bin/python"), "-m", "pip", "--version"], capture_output=True, text=True, check=True
    )
    assert str(tmp_path) in pip.stdout


def test_an_environment_is_made_anew_by_its_own_interpreter(tmp_path: Path) -> None:
    """`make setup RUNTIME=cuda` after a CPU setup: the Makefile's python3 is then the environment's own."""
    folder = tmp_path / "v"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; "
        "from setup import venv; venv.make(Path(sys.argv[2]))"
    )
    command = [str(folder / "bin" / "python3"), "-c", code, str(root()), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert (folder / "bin" / "pip").exists()

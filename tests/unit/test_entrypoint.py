"""entrypoint.sh picks the mode; a recording stand-in takes nibble's place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nibble.cli.app import verbs
from tests.support.paths import ROOT

UNBLOCKS = (
    "import os, signal, time; print(os.getpid(), flush=True); time.sleep(0.5);"
    "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM]); time.sleep(60)"
)
SCRIPT = ROOT / "entrypoint.sh"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A separate checkout, so that no .venv of this one is found, with a `nibble` on PATH that
    prints its words.
    """
    shutil.copy(SCRIPT, tmp_path / "entrypoint.sh")
    (tmp_path / "bin").mkdir()
    _script(tmp_path / "bin" / "nibble", 'printf "%s\\n" nibble "$@"')
    return tmp_path


def _script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def run(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    path = f"{folder}/bin:{os.environ['PATH']}"
    return subprocess.run(
        [folder / "entrypoint.sh", *words],
        env={"PATH": path, "HOME": str(folder), **environ},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["serve"]),
        (["serve"], ["serve"]),
        (["serve", "org/model", "--flag", "a b"], ["serve", "org/model", "--flag", "a b"]),
        (["--port", "9000"], ["serve", "--port", "9000"]),
        (["ray-head"], ["ray-head"]),
        (["ray-worker", "--num-gpus", "2"], ["ray-worker", "--num-gpus", "2"]),
        (["doctor", "MODEL", "--json"], ["doctor", "MODEL", "--json"]),
        (["cluster", "check"], ["cluster", "check"]),
        (["--help"], ["--help"]),
        (["--version"], ["--version"]),
    ],
)
def test_modes_of_nibble_reach_nibble_with_their_words(
    folder: Path, words: list[str], expected: list[str]
) -> None:
    assert run(folder, *words).stdout.splitlines() == ["nibble", *expected]


@pytest.mark.parametrize("verb", verbs())
def test_every_verb_of_nibble_is_a_first_word(folder: Path, verb: str) -> None:
    """Also where a program has the same name, as ImageMagick's `convert` has."""
    _script(folder / "bin" / verb, "echo another program")
    assert run(folder, verb, "a b").stdout.splitlines() == ["nibble", verb, "a b"]


def test_anything_else_is_executed_as_given(folder: Path) -> None:
    done = run(folder, "sh", "-c", 'echo "$1"; exit 7', "sh", "a  b")
    assert (done.stdout, done.returncode) == ("a  b\n", 7)


def test_a_misspelled_mode_is_one_line_that_names_the_modes(folder: Path) -> None:
    done = run(folder, "sevre", "org/model")
    assert done.returncode == 127 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(
        "nibble: error: 'sevre' is neither a verb of nibble nor a program; expected serve, stop,"
    )


def test_bash_has_the_environment_of_the_project(folder: Path) -> None:
    (folder / ".venv" / "bin").mkdir(parents=True)
    _script(folder / ".venv" / "bin" / "nibble", "echo of the project")
    assert run(folder, "bash", "-c", "nibble; echo $VIRTUAL_ENV").stdout.splitlines() == [
        "of the project",
        f"{folder}/.venv",
    ]


def test_the_exit_code_of_nibble_is_the_entry_points(folder: Path) -> None:
    _script(folder / "bin" / "nibble", "exit 143")
    assert run(folder, "serve").returncode == 143


def test_a_signal_reaches_nibble_because_the_script_is_gone(folder: Path) -> None:
    # nibble unblocks the signals that the script blocks, once it can handle them
    # (nibble/machine/early_stop.py).
    _script(folder / "bin" / "nibble", f"exec {sys.executable} -c '{UNBLOCKS}'")
    process = subprocess.Popen(
        [folder / "entrypoint.sh"],
        env={"PATH": f"{folder}/bin:{os.environ['PATH']}", "HOME": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid
    process.terminate()
    assert process.wait(5) == -15


def test_a_signal_to_the_script_itself_is_0_with_one_line(folder: Path) -> None:
    _script(folder / "bin" / "readlink", 'sleep 1; exec /usr/bin/readlink "$@"')
    process = subprocess.Popen(
        [folder / "entrypoint.sh"],
        env={"PATH": f"{folder}/bin:{os.environ['PATH']}", "HOME": str(folder)},
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(0.5)
    process.terminate()
    assert process.communicate(timeout=5)[1].count("no server was running") == 1
    assert process.returncode == 0


def test_without_an_installation_one_line_says_what_to_do(folder: Path) -> None:
    (folder / "bin" / "nibble").unlink()
    done = subprocess.run(
        [folder / "entrypoint.sh"],
        env={"PATH": "/usr/bin:/bin", "HOME": "/"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "make setup" in done.stderr


@pytest.mark.parametrize("home", ["", "/nonexistent"])
def test_a_home_that_is_missing_is_replaced_by_one_that_can_be_written(
    folder: Path, home: str
) -> None:
    done = run(folder, "sh", "-c", "echo $HOME", HOME=home, NIBBLE_CACHE_DIR=str(folder / "bin"))
    assert done.stdout.strip() == str(folder / "bin")


def test_a_link_to_the_script_finds_the_project(folder: Path) -> None:
    (folder / ".venv" / "bin").mkdir(parents=True)
    _script(folder / ".venv" / "bin" / "nibble", "echo of the project")
    link = folder / "link"
    link.symlink_to(folder / "entrypoint.sh")
    done = subprocess.run(
        [link],
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "of the project\n"

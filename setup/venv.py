"""The virtual environment, and the stamp that records its contents."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from setup.decide import SetupError

STAMP = "nibble-setup.json"


def python_of(venv: Path) -> Path:
    """The interpreter inside a virtual environment."""
    return venv / "bin" / "python"


def read_stamp(venv: Path) -> dict[str, str]:
    """What the last run finished ("kind", "runtime", "patches", "kernels", "dev"); empty without a
    valid stamp.
    """
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) and python_of(venv).exists() else {}


def write_stamp(venv: Path, stamp: dict[str, str]) -> None:
    """Record a finished run. The file is replaced atomically, so an interruption leaves no partial
    stamp.
    """
    fresh = venv / f"{STAMP}.new"
    fresh.write_text(json.dumps(stamp, indent=1) + "\n")
    fresh.replace(venv / STAMP)


def is_ours(venv: Path) -> bool:
    """Whether the folder is absent, empty or a virtual environment. Any other folder must not be
    removed.
    """
    return not venv.exists() or (venv / "pyvenv.cfg").is_file() or not any(venv.iterdir())


def check_folder(venv: Path, needed_bytes: int) -> None:
    """Refuse a folder that holds something else (exit 5), then a disk without room (exit 7)."""
    if not is_ours(venv):
        raise SetupError(
            5,
            f"{venv} is not a virtual environment",
            "one, or nothing, there",
            "move it or pass --venv",
        )
    free_bytes = shutil.disk_usage(next(place for place in venv.parents if place.exists())).free
    if free_bytes < needed_bytes:
        raise SetupError(
            7,
            f"{free_bytes / 1e9:.1f} GB are free where {venv} goes",
            f"{needed_bytes / 1e9:.0f} GB",
            "free some, or pass --venv on another disk",
        )


def make(venv: Path) -> None:
    """Create a new virtual environment with pip, replacing an existing one. Call `check_folder`
    first.
    """
    python = _outside(venv)
    shutil.rmtree(venv, ignore_errors=True)
    if _run(python, "-m", "venv", str(venv)) == 0:
        return
    # Debian has ensurepip in a separate package, python3-venv. Without it, another pip can install
    # itself into the environment.
    shutil.rmtree(venv, ignore_errors=True)
    if _run(python, "-m", "venv", "--without-pip", str(venv)) == 0 and (
        _run(python, "-m", "pip", "--python", str(python_of(venv)), "install", "--quiet", "pip")
        == 0
    ):
        return
    raise SetupError(
        6,
        f"{python} cannot make a virtual environment",
        "ensurepip, or a pip of 22.3 or newer",
        "install python3-venv",
    )


def _outside(venv: Path) -> str:
    """This interpreter; if it lies in `venv`, the interpreter that it was made from. The Makefile
    puts .venv/bin on PATH.
    """
    if not Path(sys.executable).is_relative_to(venv.absolute()):
        return sys.executable
    return f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"


def _run(*command: str) -> int:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, check=False
    ).returncode

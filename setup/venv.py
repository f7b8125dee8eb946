"""The virtual environment itself, and the stamp that says what is in it."""

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
    """What the last run finished ("kind", "runtime", "patches", "kernels", "dev"); empty when
    there is none to trust.
    """
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) and python_of(venv).exists() else {}


def write_stamp(venv: Path, stamp: dict[str, str]) -> None:
    """Record a finished run; written beside and moved, so that an interruption leaves no half of
    it.
    """
    fresh = venv / f"{STAMP}.new"
    fresh.write_text(json.dumps(stamp, indent=1) + "\n")
    fresh.replace(venv / STAMP)


def is_ours(venv: Path) -> bool:
    """False for a folder that is not a virtual environment: it must not be removed."""
    return not venv.exists() or (venv / "pyvenv.cfg").is_file() or not any(venv.iterdir())


def make(venv: Path) -> None:
    """A fresh virtual environment with pip in it, in place of whatever was there."""
    if not is_ours(venv):
        raise SetupError(
            5,
            f"{venv} is not a virtual environment",
            "one, or nothing, there",
            "move it or pass --venv",
        )
    python = _outside(venv)
    shutil.rmtree(venv, ignore_errors=True)
    if _run(python, "-m", "venv", str(venv)) == 0:
        return
    # Debian splits ensurepip off into python3-venv; an outside pip can put itself into an
    # environment without it.
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
    """This interpreter, or the one it is a copy of where it lies in `venv` itself (the Makefile
    puts .venv/bin on the path).
    """
    if not Path(sys.executable).is_relative_to(venv.absolute()):
        return sys.executable
    return f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"


def _run(*command: str) -> int:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, check=False
    ).returncode

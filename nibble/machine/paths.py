"""Locations of nibble's data and its caches."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from nibble.errors import ExitCode, NibbleError


def root() -> Path:
    """The folder with targets/, recipes/, rules/ and models/: NIBBLE_ROOT, the checkout or
    /opt/nibble.
    """
    return Path(os.environ.get("NIBBLE_ROOT") or Path(__file__).resolve().parents[2])


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of nibble's state (key, crash record): NIBBLE_CACHE_DIR, else the XDG cache."""
    if given := environ.get("NIBBLE_CACHE_DIR"):
        return Path(given)
    return Path(environ.get("XDG_CACHE_HOME") or f"{home(environ)}/.cache") / "nibble"


def home(environ: Mapping[str, str] = os.environ) -> str:
    """HOME, else the system's record of this user. Raises CONFIG without either (`docker run
    --user`).
    """
    found = environ.get("HOME") or os.path.expanduser("~")
    if found == "~":
        what = f"uid {os.getuid()} has no home folder"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="HOME",
            action="set HOME to a folder that this user can write",
        )
    return found


def demo_model() -> Path:
    """The embedded demo model in BF16; `make serve` serves its NVFP4 form."""
    return root() / "models" / "nibble-demo"


def demo_models() -> dict[str, Path]:
    """The embedded demo models by name: dense in BF16 and NVFP4, mixture of experts in NVFP4."""
    found = (demo_model().with_name(f"nibble-demo{form}") for form in ("", "-nvfp4", "-moe-nvfp4"))
    return {folder.name: folder for folder in found}

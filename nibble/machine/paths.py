"""Where nibble's own data and its caches lie."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from nibble.errors import ExitCode, NibbleError


def root() -> Path:
    """The folder that holds targets/, recipes/, rules/ and models/: NIBBLE_ROOT, else the
    checkout (or /opt/nibble).
    """
    return Path(os.environ.get("NIBBLE_ROOT") or Path(__file__).resolve().parents[2])


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """nibble's own state: the generated key, crash-loop record; NIBBLE_CACHE_DIR, else the XDG
    cache.
    """
    if given := environ.get("NIBBLE_CACHE_DIR"):
        return Path(given)
    return Path(environ.get("XDG_CACHE_HOME") or f"{home(environ)}/.cache") / "nibble"


def home(environ: Mapping[str, str] = os.environ) -> str:
    """HOME, else what the system knows of this user. Raises CONFIG where neither says (`docker
    run --user`).
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
    """Every embedded demo model by its name: dense in BF16 and NVFP4, and a mixture of experts
    in NVFP4.
    """
    found = (demo_model().with_name(f"nibble-demo{form}") for form in ("", "-nvfp4", "-moe-nvfp4"))
    return {folder.name: folder for folder in found}

"""Where nibble's own data and its caches lie."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def root() -> Path:
    """The folder that holds targets/, recipes/, rules/ and models/: NIBBLE_ROOT, else the checkout (or /opt/nibble)."""
    return Path(os.environ.get("NIBBLE_ROOT") or Path(__file__).resolve().parent.parent)


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """nibble's own state: the generated key, crash-loop record; NIBBLE_CACHE_DIR, else the XDG cache."""
    if given := environ.get("NIBBLE_CACHE_DIR"):
        return Path(given)
    home = environ.get("HOME") or str(Path.home())
    return Path(environ.get("XDG_CACHE_HOME") or f"{home}/.cache") / "nibble"


def demo_model() -> Path:
    """The embedded demo model in BF16; `make serve` serves its NVFP4 form."""
    return root() / "models" / "nibble-demo"


def demo_models() -> dict[str, Path]:
    """Every embedded demo model by its name: dense in BF16 and NVFP4, and a mixture of experts in NVFP4."""
    found = (demo_model().with_name(f"nibble-demo{form}") for form in ("", "-nvfp4", "-moe-nvfp4"))
    return {folder.name: folder for folder in found}

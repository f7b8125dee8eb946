"""Modules of the probes in patches/probes."""

from __future__ import annotations

from typing import Any

from nibble.engine.patching import run


def support(name: str) -> Any:
    """A support module of the probes."""
    run.load("support")
    return run.load(f"support.{name}")

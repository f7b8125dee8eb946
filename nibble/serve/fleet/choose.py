"""Decides which models to unload, and which to end when memory runs out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Loaded:
    """A model that takes memory: it loads, serves, sleeps or is being unloaded. Unloaded, it still
    takes `kept_bytes` where it sleeps.
    """

    model: str
    total_bytes: int
    running: int
    last_used_s: float
    stays: bool
    is_ready: bool
    kept_bytes: int = 0

    @property
    def freed_bytes(self) -> int:
        """What its unloading gives."""
        return self.total_bytes - self.kept_bytes


def to_unload(
    loaded: Sequence[Loaded], wanted_bytes: int, allowed_bytes: int
) -> tuple[str, ...] | None:
    """The models to unload so that `wanted_bytes` fit; empty if they fit now, None if they cannot
    for the moment.

    Idle models go before busy ones, and among them the one whose last request ended first. No
    model goes whose bytes the others' already give.
    """
    free_bytes = allowed_bytes - sum(one.total_bytes for one in loaded)
    order = sorted(
        (one for one in loaded if one.is_ready and not one.stays),
        key=lambda one: (one.running > 0, one.last_used_s),
    )
    chosen: list[Loaded] = []
    for one in order:
        if free_bytes >= wanted_bytes:
            break
        chosen.append(one)
        free_bytes += one.freed_bytes
    if free_bytes < wanted_bytes:
        return None
    for one in reversed(chosen):  # the most recently used first
        if free_bytes - one.freed_bytes >= wanted_bytes:
            chosen.remove(one)
            free_bytes -= one.freed_bytes
    return tuple(one.model for one in chosen)


def to_end(loaded: Sequence[Loaded]) -> str | None:
    """The model whose engine ends when the machine's memory runs out: one that serves nothing now,
    because it loads and takes more, or sleeps; else an idle one before a busy one, and of these
    the least used. Models that stay go last.
    """
    order = sorted(
        loaded, key=lambda one: (one.is_ready, one.stays, one.running > 0, one.last_used_s)
    )
    return order[0].model if order else None

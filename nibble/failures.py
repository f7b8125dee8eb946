"""How an engine's end is told: one line with what happened, why as far as it is known, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from nibble.errors import ExitCode, NibbleError
from nibble.governor import Limits
from nibble.memory_plan import Step, show_gib


def engine_died(
    phase: str, how: str, cause: str, lost: str, memory_ladder: Sequence[Step] | None
) -> NibbleError:
    """vLLM ended by itself.

    `cause` is the last error it logged, `lost` its process that ended first where that was not the API server;
    `memory_ladder` is given where the kernel's OOM killer struck just before.
    """
    what = f"vLLM ended by itself in phase {phase} ({how})"
    what += f": {cause}" if cause else ""
    what += f"; {lost} ended first" if lost else ""
    if memory_ladder is None:
        return NibbleError(ExitCode.ENGINE_DIED, what, "", "see the log above")
    what += "; the kernel's OOM killer struck just then"
    return NibbleError(ExitCode.ENGINE_DIED, what, "", f"to need less: {steps(memory_ladder)}")


def stopped_for_memory(phase: str, why: str, limit: Limits, ladder: Sequence[Step]) -> NibbleError:
    """The watchdog stopped the engine."""
    what = f"stopped the engine in phase {phase}: {why}, {kept(limit)}"
    expected = f"at least {show_gib(limit.stop_below_bytes)}"
    return NibbleError(ExitCode.NO_FIT, what, expected, f"to need less: {steps(ladder)}")


def kept(limit: Limits) -> str:
    """The reserve, as part of a sentence."""
    return f"{show_gib(limit.reserve_bytes)} are kept for the rest of the machine"


def steps(ladder: Sequence[Step]) -> str:
    """What to turn down, in order."""
    return ", ".join(str(step) for step in ladder)

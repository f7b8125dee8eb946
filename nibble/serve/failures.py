"""Errors for an engine's end: what happened, the known cause, and what to do. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from nibble.checkpoint.missing import SHOWN, some_of
from nibble.engine.contract import (
    DOES_NOT_FIT,
    NOT_INITIALIZED,
    NOT_LOADED,
    SCALE_ERROR,
    TENSOR_ERROR,
)
from nibble.errors import ExitCode, NibbleError
from nibble.machine.processes import signal_name
from nibble.plan.memory import Limits, Step, show_gib

_MISFIT = re.compile(rf"{TENSOR_ERROR}: (\S+) \((\w+ of shape \[[\d, ]*\])\) {DOES_NOT_FIT} \((.*)")
_UNSCALED = re.compile(rf"{SCALE_ERROR}: (\S+) {NOT_LOADED}")
SKIP = """--model-loader-extra-config '{"enable_weights_track": false}'"""


def engine_died(
    phase: str, how: str, cause: str, lost: str, memory_ladder: Sequence[Step] | None
) -> NibbleError:
    """vLLM ended by itself.

    `cause` is the last error it logged; `lost` is its process that ended first, unless the API
    server. `memory_ladder` is given if the kernel's OOM killer acted just before.
    """
    if names := _not_loaded(cause):
        is_cut = NOT_INITIALIZED in cause and not cause.endswith(
            "}"
        )  # a cause is cut at some length
        shown = f"{', '.join(names[:SHOWN])} and more" if is_cut else some_of(names)
        what = f"vLLM ended the load: no tensor of the checkpoint fills {shown}"
        action = "download the model again"
        if NOT_INITIALIZED in cause:
            action += f"; if it is complete, skip this check with {SKIP}"
        return NibbleError(
            ExitCode.MODEL, what=what, expected="a complete checkpoint", action=action
        )
    if match := _MISFIT.search(cause):
        what = f"vLLM ended the load: {match[1]}, {match[2]}, {DOES_NOT_FIT} ({match[3]}"
        action = "download the model again, or correct config.json"
        return NibbleError(
            ExitCode.MODEL,
            what=what,
            expected="the tensors that config.json describes",
            action=action,
        )
    what = f"vLLM ended by itself in phase {phase} ({how})"
    what += f": {cause}" if cause else ""
    what += f"; {lost} ended first" if lost else ""
    if memory_ladder is None:
        return NibbleError(ExitCode.ENGINE_DIED, what=what, action="see the log above")
    what += "; the kernel's OOM killer acted at the same time"
    return NibbleError(
        ExitCode.ENGINE_DIED,
        what=what,
        action=f"reduce memory, in this order: {steps(memory_ladder)}",
    )


def hung(phase: str, what: str, waited_s: float, gpus: Sequence[str]) -> NibbleError:
    """The error of the hang watch: `what` did not move, `gpus` is NVML's report."""
    line = "; ".join([f"vLLM hangs in phase {phase}: {what} for {waited_s:.0f} s", *gpus])
    action = "see the stacks in the log above; set the limit with NIBBLE_HANG_SECONDS"
    return NibbleError(ExitCode.ENGINE_DIED, what=line, action=action)


def part_ended(process: str, cause: str, kernel_has_killed: bool, code: int | None = None) -> str:
    """The facts of a node about the end of a vLLM process, for the server on another node.

    `cause` is the last logged error, `code` the exit code if known (negative: a signal).
    """
    if kernel_has_killed:
        return f"{process} was killed by the kernel, which was out of memory"
    if code is not None and code < 0:
        return f"{process} was killed by {signal_name(-code)}"
    if cause:
        return f"{process} ended by itself: {cause}"
    return (
        f"{process} ended by itself and logged no error: another process killed it, or it crashed"
    )


def _not_loaded(cause: str) -> list[str]:
    """The parameters that vLLM's check found empty, or that nibble's plugin found partly loaded."""
    if match := _UNSCALED.search(cause):
        return [match[1]]
    return sorted(re.findall(r"'([^']+)'", cause.partition(NOT_INITIALIZED)[2]))


def stopped_for_memory(phase: str, why: str, limit: Limits, ladder: Sequence[Step]) -> NibbleError:
    """The error of the watchdog that stopped the engine."""
    what = f"stopped the engine in phase {phase}: {why}, {kept(limit)}"
    expected = f"at least {show_gib(limit.stop_below_bytes)}"
    return NibbleError(
        ExitCode.NO_FIT,
        what=what,
        expected=expected,
        action=f"reduce memory, in this order: {steps(ladder)}",
    )


def kept(limit: Limits) -> str:
    """The reserve, as part of a sentence."""
    return f"{show_gib(limit.reserve_bytes)} are reserved for the rest of the machine"


def steps(ladder: Sequence[Step]) -> str:
    """The settings to reduce, in order."""
    return ", ".join(str(step) for step in ladder)

"""What is wrong with a running server and what to do about it, for the status page. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nibble.machine.gpu_state import GpuState, problem

KV_FULL_SHARE = 0.95


def advise(
    status: Mapping[str, Any],
    traffic: Mapping[str, Any] | None = None,
    gpus: Sequence[GpuState] = (),
    stall_s: float = 0.0,
) -> list[dict[str, str]]:
    """Each problem: its level (red or amber), the fact, and the action. The worst come first.

    `status` is that of /status; `stall_s` is NIBBLE_STALL_SECONDS, 0 where it is unknown.
    """
    found = [
        *_lost(status),
        *_proofs(status),
        *_memory(status),
        *_start(status, stall_s),
        *_traffic(status, traffic),
        *_gpus(gpus),
    ]
    found.sort(key=lambda one: one[0] != "red")
    return [{"level": level, "what": what, "action": action} for level, what, action in found]


Problem = tuple[str, str, str]


def _lost(status: Mapping[str, Any]) -> Iterator[Problem]:
    if lost := status.get("lost"):
        action = "Read the log. With a restart policy or systemd, nibble starts again by itself."
        yield "red", f"A process of vLLM ended: {lost}", action
    if status["state"] == "holding":
        action = "Fix the named failure, then start again; `nibble serve` prints how to reset."
        yield "red", f"Starts failed: {status.get('detail', '')}", action
    if status["state"] == "draining":
        yield "amber", "The server is stopping", "Wait. Running requests end first."


def _proofs(status: Mapping[str, Any]) -> Iterator[Problem]:
    assertion, canary = status.get("assertion", {}), status.get("canary", {})
    if deviations := assertion.get("deviations"):
        action = "Compare with `nibble plan`; see docs/canary.md."
        yield "red", f"Kernels differ from the plan: {'; '.join(deviations)}", action
    for finding in canary.get("findings", ()):
        if finding["verdict"] == "failed":
            action = "Do not trust answers. See docs/canary.md for the causes of this finding."
            yield "red", f"Canary, {finding['mechanism']}: {finding['detail']}", action
        elif finding["warning"]:
            warning = f"Canary, {finding['mechanism']}: {finding['warning']}"
            yield "amber", warning, "See docs/canary.md."


def _memory(status: Mapping[str, Any]) -> Iterator[Problem]:
    memory = status.get("memory", {})
    if status["state"] == "paused":
        action = (
            "End other programs on this machine, or start with a smaller NIBBLE_KV_CACHE_BYTES"
            " or MAX_MODEL_LEN."
        )
        yield "red", f"New requests get 503: {status.get('reason', '')}", action
    elif memory.get("action") == "pause":
        yield "amber", "Memory is short", "End other programs on this machine."


def _start(status: Mapping[str, Any], stall_s: float) -> Iterator[Problem]:
    silence_s = status.get("last_sign_of_life_age_s", 0.0)
    if status["state"] == "starting" and 0 < stall_s <= silence_s:
        action = "Wait: a first start can compile for 18 minutes. Read the log for the cause."
        yield "amber", f"The engine wrote nothing for {silence_s:.0f} s", action
    hang = status.get("hang", {})
    if hang.get("limit_s") and hang.get("waited_s", 0.0) > hang["limit_s"] / 2:
        what = f"The engine has not moved for {hang['waited_s']:.0f} s"
        action = f"Wait: nibble ends it after {hang['limit_s']:.0f} s with the stacks in the log."
        yield "red", what, action


def _traffic(status: Mapping[str, Any], traffic: Mapping[str, Any] | None) -> Iterator[Problem]:
    if traffic is None:
        if status["state"] == "ready":
            yield "red", "vLLM does not answer /metrics", "Read the log; see `nibble status`."
        return
    if (traffic["kv_share"] or 0.0) >= KV_FULL_SHARE and traffic["waiting"]:
        what = f"The KV cache is full and {traffic['waiting']} requests wait"
        action = "Send fewer or shorter requests, or start with a larger NIBBLE_KV_CACHE_BYTES."
        yield "amber", what, action


def _gpus(gpus: Sequence[GpuState]) -> Iterator[Problem]:
    for state in gpus:
        if (found := problem(state)) is not None:
            what, action = found
            yield "red", f"GPU {state.index} is {what}", f"{action[0].upper()}{action[1:]}."

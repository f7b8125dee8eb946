"""How a model gives up its memory for another: its engine ends, or sleeps. Pure.

vLLM's sleep mode (level 1) moves the weights to host memory and drops the KV cache. What else the
engine has on the GPU stays: context, CUDA graphs, workspace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from nibble.plan.memory import show_gib
from nibble.serve.fleet.budgets import Share

Unload = Literal["auto", "stop", "sleep"]
# Targets where log-probs and answers after sleep equalled those before (benchmarks/results/
# real_model_server_h200.json, several_models_h200.json)
PROVED_ON = frozenset({"hopper"})


@dataclass(frozen=True)
class Sleeper:
    """What decides whether a model may sleep. `kept_bytes` stay on the GPU, `host_bytes` go to
    host memory.
    """

    target: str
    memory_kind: str
    ranks: int
    kept_bytes: int
    host_bytes: int


def obstacle(one: Sleeper) -> str:
    """Why sleep mode frees nothing or does not exist; empty if it can be used."""
    if one.memory_kind == "host":
        return "vLLM has no sleep mode on a CPU"
    if one.memory_kind == "unified":
        return "GPU and host share one memory, so weights that sleep would free none"
    if not one.host_bytes:
        return "the size of its weights is not known"
    if one.ranks > 1:
        return "sleep mode is used for models on one GPU"
    return ""


def choose_ways(
    shares: Sequence[Share],
    sleepers: Mapping[str, Sleeper],
    wish: Unload,
    allowed_bytes: int,
    host_room_bytes: int,
) -> tuple[Share, ...]:
    """The shares with the way in which each model is unloaded, and the reason.

    Where several sleep, each one must still fit beside what all others keep, and all weights must
    fit in `host_room_bytes`; else the one that keeps most ends instead.
    """
    found = [_one(share, sleepers[share.model], wish) for share in shares]
    while problem := _too_much(found, sleepers, allowed_bytes, host_room_bytes):
        largest = max(
            (share for share in found if share.sleeps),
            key=lambda share: (share.asleep_bytes, sleepers[share.model].host_bytes),
        )
        at = found.index(largest)
        found[at] = replace(largest, sleeps=False, asleep_bytes=0, unloading=f"stop: {problem}")
    return tuple(found)


def _one(share: Share, sleeper: Sleeper, wish: Unload) -> Share:
    if share.stays:
        return replace(share, unloading="never")
    if why := obstacle(sleeper):
        return replace(share, unloading=f"stop: {why}")
    if wish == "stop":
        return replace(share, unloading="stop: NIBBLE_UNLOAD=stop")
    if wish == "auto" and sleeper.target not in PROVED_ON:
        why = f"sleep mode has not been tested on {sleeper.target}; NIBBLE_UNLOAD=sleep uses it"
        return replace(share, unloading=f"stop: {why}")
    to = f"sleep: {show_gib(sleeper.host_bytes)} of weights go to host memory"
    return replace(share, sleeps=True, asleep_bytes=sleeper.kept_bytes, unloading=to)


def _too_much(
    shares: Sequence[Share],
    sleepers: Mapping[str, Sleeper],
    allowed_bytes: int,
    host_room_bytes: int,
) -> str:
    """What does not fit while models sleep; empty if all does."""
    asleep = [share for share in shares if share.sleeps]
    if not asleep:
        return ""
    host_bytes = sum(sleepers[share.model].host_bytes for share in asleep)
    if host_bytes > host_room_bytes:
        return (
            f"{show_gib(host_bytes)} of weights would sleep in host memory, which has"
            f" {show_gib(host_room_bytes)}"
        )
    kept_bytes = sum(share.asleep_bytes for share in asleep)
    staying_bytes = sum(share.total_bytes for share in shares if share.stays)
    for share in shares:
        beside_bytes = kept_bytes - (share.asleep_bytes if share.sleeps else 0)
        needed_bytes = (0 if share.stays else share.total_bytes) + staying_bytes + beside_bytes
        if needed_bytes > allowed_bytes:
            return f"{share.model} would not fit beside what sleeping models keep on the GPU"
    return ""

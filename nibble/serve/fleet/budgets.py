"""Divides one machine's memory among several models. Pure. All figures are bytes of one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from nibble.errors import ExitCode, NibbleError
from nibble.plan.memory import show_gib

Loading = Literal["together", "on-demand"]
MIB = 1 << 20


@dataclass(frozen=True)
class Need:
    """What one model needs: `base_bytes` (weights, engine, graphs, workspace), the smallest useful
    KV cache, and one for all its sequences at full length.

    `stays`: the model is loaded at the start and never unloaded.
    """

    model: str
    base_bytes: int
    least_kv_bytes: int
    full_kv_bytes: int
    stays: bool = False

    @property
    def least_bytes(self) -> int:
        return self.base_bytes + self.least_kv_bytes


@dataclass(frozen=True)
class Share:
    """The memory of one model while it is loaded, and `asleep_bytes` of it while it sleeps.

    `unloading` says how it gives the memory up, and why (unloading.py).
    """

    model: str
    kv_bytes: int
    total_bytes: int
    stays: bool
    sleeps: bool = False
    asleep_bytes: int = 0
    unloading: str = ""


def divide(needs: Sequence[Need], allowed_bytes: int, loading: Loading) -> tuple[Share, ...]:
    """A share for each model. Raises NO_FIT, with the sum, for models that cannot fit.

    Together: every model stays, and what their smallest caches leave is divided evenly, up to each
    one's full cache. On demand: the same if all fit; else the models that stay get their smallest
    caches, and each of the others what is left beside them.
    """
    if loading == "together":
        needs = [replace(need, stays=True) for need in needs]
    if sum(need.least_bytes for need in needs) <= allowed_bytes:
        return _evenly(needs, allowed_bytes)
    staying = [need for need in needs if need.stays]
    others = [need for need in needs if not need.stays]
    largest = max(others, key=lambda need: need.least_bytes, default=None)
    required = [*staying, *([largest] if largest else [])]
    if sum(need.least_bytes for need in required) > allowed_bytes:
        raise _no_fit(required, allowed_bytes, loading)
    left_bytes = allowed_bytes - sum(need.least_bytes for need in staying)
    shares = {need.model: _share(need, need.least_kv_bytes) for need in staying}
    for need in others:
        kv_bytes = min(need.full_kv_bytes, left_bytes - need.base_bytes)
        shares[need.model] = _share(need, max(need.least_kv_bytes, kv_bytes))
    return tuple(shares[need.model] for need in needs)


def _evenly(needs: Sequence[Need], allowed_bytes: int) -> tuple[Share, ...]:
    """Smallest caches, and the rest in equal parts up to the full caches."""
    kv_bytes = {need.model: need.least_kv_bytes for need in needs}
    left_bytes = allowed_bytes - sum(need.least_bytes for need in needs)
    # The model that lacks least first: what it does not take goes to the others.
    wanting = sorted(needs, key=lambda need: need.full_kv_bytes - need.least_kv_bytes)
    for number, need in enumerate(wanting):
        part_bytes = left_bytes // (len(wanting) - number)
        more_bytes = max(0, min(part_bytes, need.full_kv_bytes - need.least_kv_bytes))
        kv_bytes[need.model] += more_bytes
        left_bytes -= more_bytes
    return tuple(_share(need, kv_bytes[need.model]) for need in needs)


def _share(need: Need, kv_bytes: int) -> Share:
    whole = max(need.least_kv_bytes, kv_bytes // MIB * MIB)
    return Share(need.model, whole, need.base_bytes + whole, need.stays)


def _no_fit(needs: Sequence[Need], allowed_bytes: int, loading: Loading) -> NibbleError:
    terms = " + ".join(f"{need.model} {show_gib(need.least_bytes)}" for need in needs)
    total_bytes = sum(need.least_bytes for need in needs)
    what = (
        f"the models do not fit together: {terms} = {show_gib(total_bytes)} needed with one"
        f" sequence each; {show_gib(allowed_bytes)} may be used"
    )
    if len(needs) == 1:
        what = what.replace("the models do not fit together", "the model does not fit")
    action = "set a smaller MAX_MODEL_LEN or serve fewer models"
    if loading == "together":
        action = f"set NIBBLE_LOADING=on-demand, which loads them by turns, or {action}"
    elif any(need.stays for need in needs):
        action = f"remove `keep` from a model, or {action}"
    return NibbleError(ExitCode.NO_FIT, what=what, action=action)

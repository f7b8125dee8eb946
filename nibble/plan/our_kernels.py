"""`--linear-kernel nibble` and `--moe-kernel nibble` over a lower layer's backend. Pure."""

from __future__ import annotations

from nibble.plan.choice import Choice, Layer
from nibble.plan.nvfp4_options import FLAG
from nibble.plan.situation import Decision, Situation


def yield_to_our_kernels(situation: Situation) -> Decision:
    """A backend that a recipe or a target names gives way to the kernel that the user names.

    A rule's backend does not: that pair is refused, as it is when both are typed.
    """
    flags: dict[str, Choice] = {}
    notices: list[str] = []
    for part in ("linear", "moe"):
        backend = f"--{part}-backend"
        kernel, given = (
            situation.flags.origin(FLAG, "nibble", f"{part}_kernel"),
            situation.flags.get(backend),
        )
        if kernel is None or given is None or given.value == "auto":
            continue
        if kernel.value["nibble"][f"{part}_kernel"] != "nibble" or given.layer > Layer.RECIPE:
            continue
        if kernel.layer <= given.layer or _is_forced(situation, backend):
            continue
        reason = f"--{part}-kernel nibble in place of the {given.source}'s {given.value}"
        flags[backend] = Choice("auto", kernel.source, reason, kernel.layer)
        notices.append(f"{backend} auto ({kernel.source}): {reason}")
    return Decision(flags, notices=tuple(notices))


def _is_forced(situation: Situation, flag: str) -> bool:
    return any(flag.removeprefix("--") in rule.force for rule in situation.rules)

"""`--linear-kernel nibble` and `--moe-kernel nibble` over a backend of a lower layer. Pure."""

from __future__ import annotations

from nibble.plan.choice import Choice, Layer
from nibble.plan.nvfp4_options import FLAG
from nibble.plan.situation import Decision, Situation


def yield_to_our_kernels(situation: Situation) -> Decision:
    """Replace a backend of a recipe or a target by `auto` if the user selects nibble's kernel.

    A backend that a rule forces stays: that pair is refused, as if the user had typed both.
    """
    flags: dict[str, Choice] = {}
    notices: list[str] = []
    for part in ("linear", "moe"):
        backend = f"--{part}-backend"
        kernel = situation.flags.origin(FLAG, "nibble", f"{part}_kernel")
        named = situation.flags.get(backend)
        if kernel is None or named is None or named.value == "auto":
            continue
        if kernel.value["nibble"][f"{part}_kernel"] != "nibble" or named.layer > Layer.RECIPE:
            continue
        if kernel.layer <= named.layer or _is_forced(situation, backend):
            continue
        reason = f"--{part}-kernel nibble in place of the {named.source}'s {named.value}"
        flags[backend] = Choice("auto", kernel.source, reason, kernel.layer)
        notices.append(f"{backend} auto ({kernel.source}): {reason}")
    return Decision(flags, notices=tuple(notices))


def _is_forced(situation: Situation, flag: str) -> bool:
    return any(flag.removeprefix("--") in rule.force for rule in situation.rules)

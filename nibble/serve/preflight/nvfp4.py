"""Finds what would make an NVFP4 checkpoint compute wrongly: damaged scales, a missing plugin."""

from __future__ import annotations

from collections.abc import Mapping

from nibble.checkpoint.cloverlm import is_cloverlm
from nibble.checkpoint.verify import check_scales
from nibble.engine.installed import missing_plugin
from nibble.errors import ExitCode, NibbleError
from nibble.plan.models.cloverlm import check_vocabulary
from nibble.plan.nvfp4_options import asked
from nibble.plan.plan import Plan
from nibble.plan.validate import drafts_from_itself


def check_nvfp4(plan: Plan, child: Mapping[str, str]) -> list[str]:
    """Lines to print for a start of `plan` with the environment `child`; reads every scale.

    Raises MODEL for damaged scales and for the vocabulary of another model, CONFIG for scales in
    another layout than the config declares and for a missing plugin that the plan needs.
    """
    checkpoint = plan.checkpoint
    values = {name: choice.value for name, choice in plan.args.items()}
    if checkpoint is None or not (
        checkpoint.scheme.is_nvfp4 or asked(values) or is_cloverlm(checkpoint)
    ):
        return []
    check_vocabulary(checkpoint, plan.args)
    lines = check_scales(checkpoint, drafts_from_itself(values.get("--speculative-config")))
    return lines + check_plugin(plan, child)


def check_plugin(plan: Plan, child: Mapping[str, str]) -> list[str]:
    """A warning where vLLM will not load nibble's plugin; raises CONFIG where the plan needs it."""
    missing = missing_plugin(child)
    if missing is None:
        return []
    what, action = missing
    options = asked({name: choice.value for name, choice in plan.args.items()})
    reasons = [*options, *(["CloverLM"] if is_cloverlm(plan.checkpoint) else [])]
    if reasons or plan.target.device == "cpu":
        needed = f"for {', '.join(reasons)}" if reasons else "for NVFP4 on the CPU"
        raise NibbleError(
            ExitCode.CONFIG, what=f"{what}, but the model needs it {needed}", action=action
        )
    return [
        f"warning: {what}: fused projections with different scales give wrong results; {action}"
    ]

"""--shared-expert: whether nibble's kernel of routed experts computes a shared one too. Pure.

The vLLM plugin gets `on`, or no value, which means vLLM's layers. What only a loaded model knows,
the plugin decides (engine/plugin/shared_expert.py): an expert that the kernel does not take stays
beside the routed ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from nibble.checkpoint import Checkpoint
from nibble.plan.choice import Choice, values_of
from nibble.plan.expert_kernel import uses_our_experts
from nibble.plan.inputs import PlanInputs
from nibble.plan.nvfp4_options import set_by_user
from nibble.trials.trial import Shape

# Targets on which `auto` takes it.
TARGETS = ("hopper",)
ONE_LAUNCH = "the shared expert is one more expert of each token in the routed ones' launch"


def choose_shared_expert(inputs: PlanInputs, args: Mapping[str, Choice]) -> Choice | None:
    """`on` or `off` with the reason; None without a shared expert beside nibble's experts."""
    if inputs.target.device != "cuda":
        return None
    values = values_of(args)
    if (given := set_by_user("shared_expert", args)) is not None:
        return given
    checkpoint = inputs.checkpoint
    if checkpoint is None or not uses_our_experts(values) or not has_shared_expert(checkpoint):
        return None
    source = str(inputs.loaded.origins["shared_expert"])
    if inputs.target.name not in TARGETS:
        return Choice("off", source, f"it is the default only on {' and '.join(TARGETS)}")
    return Choice("on", source, ONE_LAUNCH)


def has_shared_expert(checkpoint: Checkpoint) -> bool:
    """Whether a layer has one, with a name that the plugin knows."""
    return any(".shared_expert." in weight.module for weight in checkpoint.nvfp4)


def with_shared(shape: Shape) -> Shape:
    """A shared expert is one more of the layer and of each token."""
    experts, chosen, *sizes = shape
    return (experts + 1, chosen + 1, *sizes)

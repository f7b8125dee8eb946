"""Whether a start computes a reference, and for which activations. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nibble.checkpoint import Checkpoint
from nibble.machine.hardware import Hardware
from nibble.machine.targets import Target
from nibble.plan.nvfp4_options import with_served_activations
from nibble.reference.cost import affordable

if TYPE_CHECKING:
    from nibble.plan.choice import Choice
    from nibble.plan.inputs import PlanInputs

# Flags that make the server's model differ from the checkpoint.
OTHER_MODEL = (
    *("--hf-overrides", "--quantization", "--enable-lora"),
    *("--lora-modules", "--model-impl"),
)
OURS = "nibble's default"
# A reference that takes at most this share of the available memory leaves an engine on the same
# memory what was planned for it.
SMALL_SHARE = 1 / 8


def activations_served(
    checkpoint: Checkpoint, target: Target, flags: Mapping[str, Any] = MappingProxyType({})
) -> str:
    """ "fp4" if this target serves W4A4 layers with FP4 activations, else "bf16". The CPU's kernels
    and GPUs with FP4 products do.
    """
    served = with_served_activations(checkpoint, flags)
    is_w4a4 = served is not None and "fp4" in served.scheme.activations.split("+")
    return "fp4" if is_w4a4 and (target.device == "cpu" or target.features.has_fp4_mma) else "bf16"


def is_beside(
    target: Target, setting: str, checkpoint: Checkpoint | None, hardware: Hardware
) -> bool:
    """Whether the reference is computed while the engine loads. `setting` is NIBBLE_REFERENCE.

    On a GPU with separate memory, and on a CPU for a small model: half of both is imports, which
    take one core. Where a large one shares the engine's memory, the budget measured that before.
    """
    if setting == "always":
        return False
    if target.memory.kind == "discrete" or target.device != "cpu" or checkpoint is None:
        return target.memory.kind == "discrete"
    cost = affordable(checkpoint, hardware)[0] if hardware.cpu_cores > 1 else None
    return cost is not None and cost.peak_bytes <= hardware.memory_available_bytes * SMALL_SHARE


def cores_for(target: Target, setting: str, hardware: Hardware) -> int:
    """CPU cores for the reference: half of them while a GPU's model loads and compiles."""
    is_half = target.memory.kind == "discrete" and setting != "always"
    return max(1, hardware.cpu_cores // 2) if is_half else max(1, hardware.cpu_cores)


def choose_reference(inputs: PlanInputs, args: Mapping[str, Choice]) -> Choice:
    """`make`, `use` (a reference that exists, made by `nibble reference`) or `off`, with the
    reason.
    """
    from nibble.plan.choice import Choice

    settings, origins = inputs.loaded.settings, inputs.loaded.origins
    if settings.reference == "off":
        return Choice("off", str(origins["reference"]), "set by the user")
    if settings.canary == "off":
        return Choice("off", str(origins["canary"]), "the canary is off")
    load_format = args.get("--load-format")
    if load_format is not None and load_format.value == "dummy":
        return Choice("off", OURS, "the weights are random")
    # Overrides of nibble do not change the model: they describe the checkpoint's files.
    for flag in OTHER_MODEL:
        if flag in args and args[flag].source != OURS:
            return Choice("off", OURS, f"{flag} changes the checkpoint's model")
    if inputs.checkpoint is None:
        return Choice("use", OURS, "unknown until pull")
    if settings.reference == "always":
        return Choice("make", str(origins["reference"]), "set to `always`")
    cores = cores_for(inputs.target, settings.reference, inputs.hardware)
    cost, why = affordable(inputs.checkpoint, replace(inputs.hardware, cpu_cores=cores))
    return Choice("make" if cost else "use", OURS, why)

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
    from nibble.plan.inputs import Ingredients

# Under these the server's model is another one than the checkpoint's.
OTHER_MODEL = (
    "--hf-overrides",
    "--quantization",
    "--enable-lora",
    "--lora-modules",
    "--model-impl",
)
OURS = "nibble's default"


def activations_served(
    checkpoint: Checkpoint, target: Target, flags: Mapping[str, Any] = MappingProxyType({})
) -> str:
    """fp4 where W4A4 layers are served as such on this target: the CPU's kernels do, and GPUs
    with FP4 products.
    """
    served = with_served_activations(checkpoint, flags)
    is_w4a4 = served is not None and "fp4" in served.scheme.activations.split("+")
    return "fp4" if is_w4a4 and (target.device == "cpu" or target.features.has_fp4_mma) else "bf16"


def is_beside(target: Target, asked: str) -> bool:
    """Whether the engine loads meanwhile. Where both would share memory and cores, the engine's
    memory is what was measured as available before, and neither would be faster. `asked`:
    NIBBLE_REFERENCE."""
    return target.memory.kind == "discrete" and asked != "always"


def cores_for(target: Target, asked: str, hardware: Hardware) -> int:
    """Beside a load and its compilation, half of the cores."""
    return (
        max(1, hardware.cpu_cores // 2) if is_beside(target, asked) else max(1, hardware.cpu_cores)
    )


def choose_reference(parts: Ingredients, args: Mapping[str, Choice]) -> Choice:
    """`make`, `use` (one that is there, made by `nibble reference`) or `off`, with the reason."""
    from nibble.plan.choice import Choice

    settings, origins = parts.loaded.settings, parts.loaded.origins
    if settings.reference == "off":
        return Choice("off", str(origins["reference"]), "set by the user")
    if settings.canary == "off":
        return Choice("off", str(origins["canary"]), "the canary is off")
    found = args.get("--load-format")
    if found is not None and found.value == "dummy":
        return Choice("off", OURS, "the weights are random")
    # nibble's own overrides say what the checkpoint's files mean
    if other := next(
        (flag for flag in OTHER_MODEL if flag in args and args[flag].source != OURS), None
    ):
        return Choice("off", OURS, f"{other} changes the checkpoint's model")
    if parts.checkpoint is None:
        return Choice("use", OURS, "unknown until pull")
    if settings.reference == "always":
        return Choice("make", str(origins["reference"]), "set to `always`")
    cores = cores_for(parts.target, settings.reference, parts.hardware)
    cost, why = affordable(parts.checkpoint, replace(parts.hardware, cpu_cores=cores))
    return Choice("make" if cost else "use", OURS, why)

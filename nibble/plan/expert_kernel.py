"""--moe-kernel: which kernel computes NVFP4 and E4M3 experts on a GPU. Pure.

The vLLM plugin gets `nibble`, or no value, which means vLLM's choice (nvfp4_options.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nibble.checkpoint import Checkpoint
from nibble.engine.contract import CONFIG_KEY
from nibble.errors import ExitCode, NibbleError
from nibble.plan.choice import Choice, Choices, values_of
from nibble.plan.expert_shapes import expert_uses, expert_weights, has_e4m3_experts
from nibble.plan.fp4_products import serves_in_fp4
from nibble.plan.inputs import PlanInputs
from nibble.plan.nvfp4_options import FLAG, REASON, asked
from nibble.plan.one_order import is_batch_invariant
from nibble.plan.part_kernels import DEFAULT_SEQUENCES, PartKernels, before_times
from nibble.recipes.rules import in_effect
from nibble.trials.choose import (
    EXPERTS,
    EXPERTS_FP4,
    Form,
    Kernel,
    Part,
    choose,
    our_fault,
    summary,
)

# Targets on which nibble's experts have served a model faster than vLLM's: `auto` takes them there.
TARGETS = ("hopper",)
SERVED = "faster than vLLM's in a server (docs/kernels/nvfp4_linear.md)"
UNSERVED = "nibble's experts have not been measured in a server"
# Flags that need a kernel of vLLM's, and what they are for.
_OBSTACLES = {
    "--enable-eplb": "experts that move between GPUs (EPLB)",
    "--enable-lora": "adapters",
}


def choose_expert_kernel(inputs: PlanInputs, args: Mapping[str, Choice]) -> PartKernels:
    """The kernel of NVFP4 experts, from the settings, then from trials on this machine."""
    checkpoint, values = inputs.checkpoint, values_of(args)
    if inputs.target.device != "cuda" or checkpoint is None:
        return PartKernels()
    if not _has_experts(checkpoint):
        return PartKernels(_of_e4m3(inputs, args, checkpoint))
    choice, is_set = _chosen(inputs, args), "moe_kernel" in asked(values)
    setting = inputs.loaded.settings.moe_kernel
    if inputs.trials is None or in_effect("--moe-backend", values) != "auto":
        return PartKernels(choice)
    form: Form = "fp4" if "fp4" in checkpoint.scheme.activations else "bf16"
    uses = expert_uses(checkpoint, values, form)
    if is_set or setting != "auto":
        ours, part = choice.value == "nibble", trial_part(inputs)
        uses = uses if ours else ()
        return PartKernels(choice, (), "", _fault_of(choice, inputs), uses, ours, part=part)
    if not uses or _obstacle(inputs, values):
        return PartKernels(choice)
    most_rows = int(values.get("--max-num-seqs") or DEFAULT_SEQUENCES)
    found = _by_trials(inputs, uses, choice, most_rows)
    return replace(found, uses=uses, tries_ours=True, is_timed=True, part=trial_part(inputs))


def trial_part(inputs: PlanInputs) -> Part:
    """The trials of nibble's kernel for the checkpoint's experts."""
    return EXPERTS_FP4 if serves_in_fp4(inputs.checkpoint, inputs.target) else EXPERTS


def _of_e4m3(
    inputs: PlanInputs, args: Mapping[str, Choice], checkpoint: Checkpoint
) -> Choice | None:
    """nibble's kernel of E4M3 experts only where the user sets it: vLLM's is faster."""
    choice = _chosen(inputs, args) if has_e4m3_experts(checkpoint) else None
    return choice if choice is not None and choice.value == "nibble" else None


def _by_trials(inputs: PlanInputs, uses: Any, choice: Choice, most_rows: int) -> PartKernels:
    """All layers have one kernel: nibble's where it is the faster for each shape."""
    record = inputs.trials
    assert record is not None
    part = trial_part(inputs)
    if decided := before_times(inputs, choice, part, "nibble's"):
        return PartKernels(decided)
    default: Kernel = "nibble" if choice.value == "nibble" else "vllm"
    shapes = choose(uses, record, default, most_rows, part)
    if all(shape.ratio is None and shape.kernel == default for shape in shapes):
        return PartKernels(choice, shapes)
    is_ours = all(shape.kernel == "nibble" for shape in shapes)
    if not is_ours:
        shapes = tuple(replace(shape, kernel="vllm") for shape in shapes)
    reason = f"measured on this machine: {summary(shapes)}"
    return PartKernels(Choice("nibble" if is_ours else "vllm", choice.source, reason), shapes)


def _fault_of(choice: Choice, inputs: PlanInputs) -> tuple[str, ...]:
    """A note where the user's kernel failed on this machine: the setting stays."""
    assert inputs.trials is not None
    fault = our_fault(inputs.trials, trial_part(inputs)) if choice.value == "nibble" else None
    return (f"nibble's experts failed on this machine: {fault.line()}",) if fault else ()


def _chosen(inputs: PlanInputs, args: Mapping[str, Choice]) -> Choice:
    """The choice without trials."""
    values, setting = values_of(args), inputs.loaded.settings.moe_kernel
    source, in_config = str(inputs.loaded.origins["moe_kernel"]), asked(values).get("moe_kernel")
    if setting != "auto" and in_config in (None, setting):
        return Choice(setting, source, "set by the user")
    if in_config is not None:
        return Choice(in_config, args[FLAG].source, "set by the user")
    if obstacle := _obstacle(inputs, values):
        return Choice("vllm", source, obstacle)
    is_served = inputs.target.name in TARGETS
    return Choice("nibble" if is_served else "vllm", source, SERVED if is_served else UNSERVED)


def expert_kernel_flags(kernels: PartKernels, args: Mapping[str, Choice]) -> Choices:
    """The flag that selects nibble's kernel, unless `args` has one."""
    chosen = kernels.choice
    if chosen is None or chosen.value != "nibble" or "moe_kernel" in asked(values_of(args)):
        return {}
    return {FLAG: Choice({CONFIG_KEY: {"moe_kernel": "nibble"}}, chosen.source, REASON)}


def uses_our_experts(args: Mapping[str, Any]) -> bool:
    """Whether the final flags select nibble's experts."""
    return asked(args).get("moe_kernel") == "nibble"


def check_experts(inputs: PlanInputs, args: Mapping[str, Any]) -> None:
    """Raise CONFIG for a flag that nibble's experts cannot serve."""
    if not uses_our_experts(args):
        return
    for flag, what in _OBSTACLES.items():
        if args.get(flag) not in (None, False):
            raise NibbleError(
                ExitCode.CONFIG,
                what=f"{flag} and NIBBLE_MOE_KERNEL=nibble are both set, but only vLLM's kernels"
                f" have {what}",
                expected="one of them",
                action=f"drop {flag}, or unset NIBBLE_MOE_KERNEL or drop --moe-kernel",
            )


def _has_experts(checkpoint: Checkpoint) -> bool:
    """Whether experts are NVFP4, or may be where no headers were read."""
    if not checkpoint.scheme.is_nvfp4 or not checkpoint.num_experts:
        return False
    return checkpoint.weights is None or any(True for _ in expert_weights(checkpoint))


def _obstacle(inputs: PlanInputs, args: Mapping[str, Any]) -> str:
    """Why `auto` does not take nibble's kernel; empty if nothing prevents it."""
    checkpoint = inputs.checkpoint
    assert checkpoint is not None
    if (backend := in_effect("--moe-backend", args)) != "auto":
        return f"--moe-backend {backend} names another kernel"
    if inputs.without_gpu_kernels:
        return inputs.without_gpu_kernels
    if has_e4m3_experts(checkpoint):
        return "nibble's kernel of E4M3 experts is slower than vLLM's from 4 tokens on"
    in_fp4 = inputs.target.features.has_fp4_mma and "fp4" in checkpoint.scheme.activations
    if in_fp4 and not serves_in_fp4(checkpoint, inputs.target):
        return f"{inputs.target.name} multiplies FP4 activations, which nibble's kernel leaves"
    if is_batch_invariant(inputs.environ):
        return "nibble's sums of experts depend on the number of tokens"
    for flag, what in _OBSTACLES.items():
        if args.get(flag) not in (None, False):
            return f"only vLLM's kernels have {what}"
    dtype = str(args.get("--dtype") or "auto")
    if dtype not in ("auto", "bfloat16") or (dtype == "auto" and checkpoint.dtype == "float16"):
        return "nibble's experts need BF16 activations"
    return ""

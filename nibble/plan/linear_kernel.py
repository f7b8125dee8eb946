"""--linear-kernel: which kernel multiplies NVFP4 weights on a GPU. Pure.

The vLLM plugin gets `nibble`, or no value, which means vLLM's choice (nvfp4_options.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nibble.checkpoint import Checkpoint
from nibble.checkpoint.nvfp4 import dense_weights
from nibble.engine.contract import CONFIG_KEY
from nibble.plan.choice import OURS, Choice, Choices, tensor_parallel_size, values_of
from nibble.plan.fp4_products import columns_problem, serves_in_fp4
from nibble.plan.inputs import PlanInputs
from nibble.plan.linear_shapes import linear_uses
from nibble.plan.nvfp4_options import FLAG, REASON, asked, set_by_user
from nibble.plan.one_order import INVARIANT, is_batch_invariant, kernels_in_one_order
from nibble.plan.part_kernels import DEFAULT_SEQUENCES, UNTRIED, PartKernels
from nibble.recipes.rules import in_effect
from nibble.trials.catalog import OURS_BY_DEFAULT
from nibble.trials.choose import (
    LINEAR,
    LINEAR_FP4,
    Form,
    Part,
    Use,
    choose,
    is_proven,
    our_fault,
    right_backend,
    summary,
    vllm_fault,
)
from nibble.trials.trial import Outcome, shape_name

# Targets on which nibble's kernels have run. They have no FP4 products, so W4A4 is served
# weight-only. On SM12x nibble's kernels have FP4 products too (fp4_products.py).
TARGETS = OURS_BY_DEFAULT
FOR_ALL_ROWS = "nibble's kernels take any number of rows (docs/kernels/nvfp4_linear.md)"
# Of a weight's rows on each GPU: kernels/src/nibble_kernels/nvfp4_linear/weight.py.
ROW_MULTIPLE = 8


def choose_linear_kernel(inputs: PlanInputs, args: Mapping[str, Choice]) -> PartKernels:
    """The kernels of NVFP4 linear layers, from the settings, then from trials on this machine."""
    choice, checkpoint, values = _chosen(inputs, args), inputs.checkpoint, values_of(args)
    if choice is None or inputs.trials is None or checkpoint is None or not checkpoint.weights:
        return PartKernels(choice)
    split = tensor_parallel_size(values)
    uses = linear_uses(checkpoint, split, trial_form(inputs))
    if in_effect("--linear-backend", values) != "auto":
        return PartKernels(choice)
    is_set = "linear_kernel" in asked(values) or choice.source == INVARIANT
    if is_set or inputs.loaded.settings.linear_kernel != "auto":
        ours = choice.value == "nibble"
        part = trial_part(inputs)
        return PartKernels(choice, (), "", _fault_of(choice, inputs), uses, ours, part=part)
    tries = may_be_tried(inputs, values)
    most_rows = int(values.get("--max-num-seqs") or DEFAULT_SEQUENCES)
    found = _by_trials(inputs, uses, tries, choice, most_rows)
    return replace(found, uses=uses, tries_ours=tries, is_timed=tries, part=trial_part(inputs))


def trial_form(inputs: PlanInputs) -> Form:
    """The activations of the checkpoint's layers as served, for vLLM's choice of a kernel."""
    checkpoint = inputs.checkpoint
    return "fp4" if checkpoint is not None and "fp4" in checkpoint.scheme.activations else "bf16"


def trial_part(inputs: PlanInputs) -> Part:
    """The trials of nibble's kernel for the checkpoint's layers."""
    return LINEAR_FP4 if serves_in_fp4(inputs.checkpoint, inputs.target) else LINEAR


def may_be_tried(inputs: PlanInputs, args: Mapping[str, Any]) -> bool:
    """Whether nibble's kernel could serve these layers if trials on this machine approve it."""
    in_fp4 = inputs.target.features.has_fp4_mma and trial_form(inputs) == "fp4"
    is_served = not in_fp4 or serves_in_fp4(inputs.checkpoint, inputs.target)
    return is_served and not _obstacle(inputs, args)


def _by_trials(
    inputs: PlanInputs, uses: tuple[Use, ...], tries: bool, choice: Choice, most_rows: int
) -> PartKernels:
    record = inputs.trials
    assert record is not None
    if not uses or not tries:
        return _without_ours(inputs, choice, vllm_fault(record, uses))
    part = trial_part(inputs)
    if choice.value == "vllm" and not is_proven(record, part):
        if fault := our_fault(record, part):
            choice = replace(choice, reason=f"nibble's kernel is not used: {fault.line()}")
        elif inputs.loaded.settings.trials != "off":
            choice = replace(choice, reason=f"{choice.reason}; {UNTRIED}")
        return _without_ours(inputs, choice, vllm_fault(record, uses))
    shapes = choose(uses, record, choice.value, most_rows, part)
    ours = [shape for shape in shapes if shape.kernel == "nibble"]
    is_measured = any(shape.ratio is not None for shape in shapes)
    if not is_measured and len(ours) == len(shapes) and choice.value == "nibble":
        return PartKernels(choice, shapes)
    reason = f"measured on this machine: {summary(shapes)}" if is_measured else shapes[0].why
    return PartKernels(Choice("nibble" if ours else "vllm", choice.source, reason), shapes)


def _without_ours(inputs: PlanInputs, choice: Choice, fault: Outcome | None) -> PartKernels:
    """vLLM's choice, or another backend of vLLM's where that was wrong on this machine."""
    assert inputs.trials is not None
    if fault is None:
        return PartKernels(choice)
    if backend := right_backend(inputs.trials, trial_form(inputs)):
        notice = f"--linear-backend {backend}: vLLM's choice is not used: {fault.line()}"
        return PartKernels(choice, backend=backend, notices=(notice,))
    notice = f"vLLM's kernel failed here, and no other one can replace it: {fault.line()}"
    return PartKernels(choice, notices=(notice,))


def _fault_of(choice: Choice, inputs: PlanInputs) -> tuple[str, ...]:
    """A note where the user's kernel failed on this machine: the setting stays."""
    assert inputs.trials is not None
    fault = our_fault(inputs.trials, trial_part(inputs)) if choice.value == "nibble" else None
    return (f"nibble's linear kernel failed on this machine: {fault.line()}",) if fault else ()


def _chosen(inputs: PlanInputs, args: Mapping[str, Choice]) -> Choice | None:
    """The choice without trials."""
    checkpoint = inputs.checkpoint
    if inputs.target.device != "cuda" or not _may_be_nvfp4(checkpoint):
        return None
    values = {name: choice.value for name, choice in args.items()}
    if (given := set_by_user("linear_kernel", args)) is not None:
        return given
    if _must_be_ours(inputs) and in_effect("--linear-backend", values) == "auto":
        return Choice(
            "nibble", INVARIANT, "vLLM has no weight-only kernel with a fixed order of additions"
        )
    setting, source = (
        inputs.loaded.settings.linear_kernel,
        str(inputs.loaded.origins["linear_kernel"]),
    )
    if setting != "auto":
        return Choice(setting, source, "set by the user")
    if inputs.target.name not in TARGETS:
        reason = f"nibble's kernel is tested only on {' and '.join(TARGETS)}"
        if serves_in_fp4(checkpoint, inputs.target):
            where = inputs.target.name
            reason = f"nibble's W4A4 kernel has not been measured in a server on {where}"
        return Choice("vllm", source, _fp4_obstacle(inputs, values) or reason)
    if obstacle := _obstacle(inputs, values):
        return Choice("vllm", source, obstacle)
    if is_batch_invariant(inputs.environ):
        return Choice(
            "nibble",
            INVARIANT,
            "vLLM's only W4A4 kernel with a fixed order of additions here is its slow emulation",
        )
    return Choice("nibble", source, FOR_ALL_ROWS)


def _may_be_nvfp4(checkpoint: Checkpoint | None) -> bool:
    if checkpoint is None:
        return True
    return checkpoint.scheme.is_nvfp4 or checkpoint.scheme.vllm_quantization == "quartet2"


def _must_be_ours(inputs: PlanInputs) -> bool:
    """Whether the plugin takes nibble's kernel without a setting: for weight-only layers under
    VLLM_BATCH_INVARIANT.
    """
    if not is_batch_invariant(inputs.environ) or inputs.checkpoint is None:
        return False
    return kernels_in_one_order(inputs.checkpoint, inputs.target) == {"nibble"}


def linear_kernel_flags(kernels: PartKernels, args: Mapping[str, Choice]) -> Choices:
    """The flags that select the kernels, unless `args` has one."""
    chosen = kernels.choice
    if kernels.backend:
        return {"--linear-backend": Choice(kernels.backend, OURS, kernels.notices[0])}
    if chosen is None or chosen.value != "nibble":
        return {}
    if "linear_kernel" in asked(values_of(args)):
        return {}
    options = {"linear_kernel": "nibble"}
    if theirs := [shape for shape in kernels.shapes if shape.kernel == "vllm"]:
        options["vllm_shapes"] = ",".join(shape_name(shape.use.shape) for shape in theirs)
    return {FLAG: Choice({CONFIG_KEY: options}, chosen.source, REASON)}


def _obstacle(inputs: PlanInputs, args: Mapping[str, Any]) -> str:
    """Why `auto` does not take nibble's kernel; empty if nothing prevents it."""
    checkpoint = inputs.checkpoint
    if (backend := in_effect("--linear-backend", args)) != "auto":
        return f"--linear-backend {backend} names another kernel"
    if inputs.without_gpu_kernels:
        return inputs.without_gpu_kernels
    if checkpoint is None:
        return "the checkpoint is unknown until pull"
    if obstacle := _fp4_obstacle(inputs, args):
        return obstacle
    if checkpoint.scheme.vllm_quantization == "quartet2":
        return ""  # rows of a product are columns of another one: multiples of 16 on every GPU
    if checkpoint.weights is None:
        return ""
    dense = dense_weights(checkpoint.nvfp4)
    if not dense:
        return "only experts are NVFP4; NIBBLE_MOE_KERNEL sets their kernel"
    split = ROW_MULTIPLE * tensor_parallel_size(args)
    if odd := next((weight for weight in dense if weight.rows % split), None):
        return f"{odd.module} has {odd.rows} rows, not a multiple of {split}"
    return ""


def _fp4_obstacle(inputs: PlanInputs, args: Mapping[str, Any]) -> str:
    """The same of nibble's kernel for FP4 activations, where it would be the one."""
    checkpoint = inputs.checkpoint
    if checkpoint is None or not serves_in_fp4(checkpoint, inputs.target):
        return ""
    if is_batch_invariant(inputs.environ):
        return "the order of nibble's W4A4 sums depends on the number of rows"
    if "bf16" in checkpoint.scheme.activations.split("+"):
        return (
            "some layers have activations in FP4 and others in BF16, which trials do not tell apart"
        )
    if checkpoint.weights is None:
        return ""
    return columns_problem(checkpoint, tensor_parallel_size(args))

"""Which kernel multiplies few rows by the FP8 weights of linear layers, in a checkpoint that mixes
them with NVFP4. Pure.

NIBBLE_LINEAR_KERNEL sets it too. The vLLM plugin gets `nibble`, or no value, which means vLLM's
choice. What only a loaded model knows, the plugin decides (engine/plugin/e4m3_linear.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nibble.checkpoint import Checkpoint
from nibble.plan.choice import Choice, tensor_parallel_size, values_of
from nibble.plan.inputs import PlanInputs
from nibble.plan.linear_shapes import e4m3_uses, e4m3_weights
from nibble.plan.nvfp4_options import FLAG, asked
from nibble.plan.one_order import is_batch_invariant
from nibble.plan.part_kernels import DEFAULT_SEQUENCES, PartKernels, before_times
from nibble.recipes.rules import in_effect
from nibble.trials.catalog import OURS_BY_DEFAULT
from nibble.trials.choose import (
    E4M3,
    Kernel,
    ShapeChoice,
    Use,
    choose,
    mean_ratio,
    our_fault,
    times_together,
    vllm_fault,
)

NAME = "e4m3_linear"
# Targets on which nibble's kernel has run, so that `auto` takes it without a trial.
TARGETS = OURS_BY_DEFAULT
BF16_ACTIVATIONS = "few rows keep BF16 activations; vLLM's kernel takes more, from the same weight"


def choose_e4m3_linear(inputs: PlanInputs, args: Mapping[str, Choice]) -> PartKernels:
    """The kernel from the settings, then from trials on this machine. No choice without FP8 linear
    layers beside NVFP4 weights.

    args: before the plan has chosen the kernel of NVFP4 layers.
    """
    checkpoint, values = inputs.checkpoint, values_of(args)
    if inputs.target.device != "cuda" or checkpoint is None or not has_e4m3_layers(checkpoint):
        return PartKernels(part=E4M3)
    given, source = _given(inputs, args)
    obstacle = _obstacle(inputs, values)
    is_set = given != "auto"
    if given == "vllm" or obstacle:
        reason = "set by the user" if given == "vllm" else obstacle
        return PartKernels(Choice("vllm", source, reason), part=E4M3)
    choice = Choice("nibble", source, "set by the user") if is_set else _untried(inputs, source)
    uses = e4m3_uses(checkpoint, tensor_parallel_size(values))
    if inputs.trials is None or not uses:
        return PartKernels(choice, part=E4M3)
    if is_set:
        found = PartKernels(choice, notices=_our_fault(inputs))
    else:
        most_rows = int(values.get("--max-num-seqs") or DEFAULT_SEQUENCES)
        found = _by_trials(inputs, uses, choice, most_rows)
    notices = (*found.notices, *_their_fault(inputs, uses))
    return replace(
        found, notices=notices, uses=uses, tries_ours=True, is_timed=not is_set, part=E4M3
    )


def has_e4m3_layers(checkpoint: Checkpoint) -> bool:
    """Whether an NVFP4 checkpoint has E4M3 weights outside experts. Not MXFP8."""
    return checkpoint.scheme.is_nvfp4 and any(True for _ in e4m3_weights(checkpoint))


def _given(inputs: PlanInputs, args: Mapping[str, Choice]) -> tuple[str, str]:
    """The user's value or `auto`, and where it comes from."""
    options = asked(values_of(args))
    for name in (NAME, "linear_kernel"):
        if (given := options.get(name)) is not None:
            return str(given), args[FLAG].source
    return inputs.loaded.settings.linear_kernel, str(inputs.loaded.origins["linear_kernel"])


def _untried(inputs: PlanInputs, source: str) -> Choice:
    """The choice without trials."""
    if inputs.target.name in TARGETS:
        return Choice("nibble", source, BF16_ACTIVATIONS)
    return Choice("vllm", source, f"nibble's kernel is tested only on {' and '.join(TARGETS)}")


def _by_trials(
    inputs: PlanInputs, uses: tuple[Use, ...], choice: Choice, most_rows: int
) -> PartKernels:
    """All layers have one choice: nibble's kernel where that takes less time for all of them."""
    record = inputs.trials
    assert record is not None
    if decided := before_times(inputs, choice, E4M3, "nibble's kernel"):
        return PartKernels(decided)
    default: Kernel = "nibble" if choice.value == "nibble" else "vllm"
    shapes = choose(uses, record, default, most_rows, E4M3)
    kernel, measured = shapes[0].kernel, _summary(shapes, most_rows)
    if not measured and kernel == default == "nibble":
        return PartKernels(choice, shapes)
    return PartKernels(Choice(kernel, choice.source, measured or shapes[0].why), shapes)


def _summary(shapes: tuple[ShapeChoice, ...], most_rows: int) -> str:
    """Both times of all layers; empty without any."""
    times = times_together(shapes)
    if (ratio := mean_ratio(times, most_rows)) is None:
        return ""
    rows = next(iter(times.nibble))
    both = f"{times.nibble[rows]:.1f} µs vs {times.vllm[rows]:.1f} µs"
    return (
        f"measured on this machine: nibble's kernel takes {ratio:.2f} of vLLM's time in the mean"
        f" ({both} for all layers with {rows} row{'' if rows == '1' else 's'})"
    )


def _our_fault(inputs: PlanInputs) -> tuple[str, ...]:
    """A note where the user's kernel failed on this machine: the setting stays."""
    assert inputs.trials is not None
    fault = our_fault(inputs.trials, E4M3)
    return (f"nibble's FP8 kernel failed on this machine: {fault.line()}",) if fault else ()


def _their_fault(inputs: PlanInputs, uses: tuple[Use, ...]) -> tuple[str, ...]:
    """A note where vLLM's kernel did: it multiplies more rows in any case."""
    assert inputs.trials is not None
    fault = vllm_fault(inputs.trials, uses, E4M3)
    what = "vLLM's FP8 kernel failed on this machine, and many rows need it"
    return (f"{what}: {fault.line()}",) if fault else ()


def _obstacle(inputs: PlanInputs, values: Mapping[str, Any]) -> str:
    """Why vLLM's kernel multiplies alone; empty if nothing prevents nibble's beside it."""
    checkpoint = inputs.checkpoint
    assert checkpoint is not None
    if (backend := in_effect("--linear-backend", values)) != "auto":
        return f"--linear-backend {backend} names another kernel"
    if problem := inputs.without_plugin or inputs.without_gpu_kernels:
        return problem
    if is_batch_invariant(inputs.environ):
        return "nibble's order of additions depends on the number of rows"
    if values.get("--enable-lora") not in (None, False):
        return "layers with adapters keep vLLM's kernel"
    dtype = str(values.get("--dtype") or "auto")
    if dtype not in ("auto", "bfloat16") or (dtype == "auto" and checkpoint.dtype == "float16"):
        return "nibble's kernel needs BF16 activations"
    return ""

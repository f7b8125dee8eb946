"""--linear-kernel: which kernel multiplies NVFP4 weights with BF16 activations. Pure.

The vLLM plugin gets `nibble`, or no value, which means vLLM's choice (nvfp4_options.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nibble.checkpoint import Checkpoint
from nibble.checkpoint.nvfp4 import dense_weights
from nibble.engine.contract import CONFIG_KEY
from nibble.plan.choice import Choice, Choices, values_of
from nibble.plan.inputs import PlanInputs
from nibble.plan.nvfp4_options import FLAG, REASON, asked
from nibble.plan.one_order import INVARIANT, is_batch_invariant, kernels_in_one_order
from nibble.recipes.rules import in_effect

# Targets on which nibble's kernels have run. They have no FP4 products, so W4A4 is served
# weight-only.
TARGETS = ("hopper",)
FOR_ALL_ROWS = "nibble's kernels take any number of rows (docs/kernels/nvfp4_linear.md)"
# Of a weight's rows on each GPU: kernels/src/nibble_kernels/nvfp4_linear/weight.py.
ROW_MULTIPLE = 8


def choose_linear_kernel(inputs: PlanInputs, args: Mapping[str, Choice]) -> Choice | None:
    """`vllm` or `nibble` with the reason; None on the CPU and for a checkpoint without NVFP4."""
    checkpoint = inputs.checkpoint
    if inputs.target.device != "cuda" or not _may_be_nvfp4(checkpoint):
        return None
    values = {name: choice.value for name, choice in args.items()}
    if (in_config := asked(values).get("linear_kernel")) is not None:
        return Choice(in_config, args[FLAG].source, "set by the user")
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


def linear_kernel_flags(chosen: Choice | None, args: Mapping[str, Choice]) -> Choices:
    """The flag that selects the kernel in the plugin, unless `args` has one."""
    if chosen is None or chosen.value != "nibble":
        return {}
    if "linear_kernel" in asked(values_of(args)):
        return {}
    return {FLAG: Choice({CONFIG_KEY: {"linear_kernel": "nibble"}}, chosen.source, REASON)}


def _obstacle(inputs: PlanInputs, args: Mapping[str, Any]) -> str:
    """Why `auto` does not take nibble's kernel; empty if nothing prevents it."""
    checkpoint, target = inputs.checkpoint, inputs.target
    if target.name not in TARGETS:
        return f"nibble's kernel is tested only on {' and '.join(TARGETS)}"
    if (backend := in_effect("--linear-backend", args)) != "auto":
        return f"--linear-backend {backend} names another kernel"
    if inputs.without_gpu_kernels:
        return inputs.without_gpu_kernels
    if checkpoint is None:
        return "the checkpoint is unknown until pull"
    if checkpoint.scheme.vllm_quantization == "quartet2":
        return ""  # rows of a product are columns of another one: multiples of 16 on every GPU
    if checkpoint.weights is None:
        return ""
    dense = dense_weights(checkpoint.nvfp4)
    if not dense:
        return "only experts are NVFP4; NIBBLE_MOE_KERNEL sets their kernel"
    split = ROW_MULTIPLE * int(args.get("--tensor-parallel-size", 1))
    if odd := next((weight for weight in dense if weight.rows % split), None):
        return f"{odd.module} has {odd.rows} rows, not a multiple of {split}"
    return ""

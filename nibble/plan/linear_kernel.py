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
from nibble.plan.startup import SPECULATIVE
from nibble.recipes.rules import in_effect

# Rows of a product. Up to MOST_ROWS nibble's kernel was faster in every measured product; with
# TOO_MANY_ROWS it was slower on average.
MOST_ROWS, TOO_MANY_ROWS = 16, 24
CROSSOVER = (
    f"on an H200 nibble's kernel is faster than vLLM's choice up to {MOST_ROWS} rows and slower"
    f" with {TOO_MANY_ROWS} (benchmarks/results/nvfp4_linear_h200.json)"
)
# Targets on which nibble's kernel has run. They have no FP4 products, so W4A4 is served
# weight-only.
TARGETS = ("hopper",)
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
    rows = rows_of_a_step(checkpoint, values)
    if rows is None:
        return Choice("vllm", source, f"vLLM decides the rows of a decode step; {CROSSOVER}")
    kernel = "nibble" if rows <= MOST_ROWS else "vllm"
    return Choice(kernel, source, f"a decode step has up to {rows} rows; {CROSSOVER}")


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


def rows_of_a_step(checkpoint: Checkpoint | None, args: Mapping[str, Any]) -> int | None:
    """The most rows of a decode step: one token and its drafts for each sequence. None if vLLM
    decides the number, and for diffusion models, whose steps are whole canvases.
    """
    sequences, drafts = args.get("--max-num-seqs"), _drafts(args)
    is_diffusion = checkpoint is not None and checkpoint.config.get("canvas_length") is not None
    if sequences is None or drafts is None or is_diffusion or "--diffusion-config" in args:
        return None
    return int(sequences) * (1 + drafts)


def _drafts(args: Mapping[str, Any]) -> int | None:
    """Tokens drafted for each sequence; None if only the draft's configuration has the number."""
    if not any(name in args for name in SPECULATIVE):
        return 0
    config = args.get("--speculative-config")
    speculative = config if isinstance(config, Mapping) else {}
    keys = {name.replace("-", "_"): value for name, value in speculative.items()}
    drafts = args.get("--spec-tokens", keys.get("num_speculative_tokens"))
    return None if drafts is None else int(drafts)


def _obstacle(inputs: PlanInputs, args: Mapping[str, Any]) -> str:
    """Why `auto` does not take nibble's kernel, regardless of the rows; empty if nothing prevents
    it.
    """
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

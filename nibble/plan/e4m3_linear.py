"""Which kernel multiplies few rows by the FP8 weights of linear layers, in a checkpoint that mixes
them with NVFP4. Pure.

NIBBLE_LINEAR_KERNEL sets it too. The vLLM plugin gets `nibble`, or no value, which means vLLM's
choice. What only a loaded model knows, the plugin decides (engine/plugin/e4m3_linear.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nibble.checkpoint import Checkpoint
from nibble.checkpoint.nvfp4 import EXPERT, STACKED_EXPERTS
from nibble.engine.contract import CONFIG_KEY
from nibble.plan.choice import Choice, Choices, values_of
from nibble.plan.inputs import PlanInputs
from nibble.plan.nvfp4_options import FLAG, REASON, asked
from nibble.plan.one_order import is_batch_invariant
from nibble.recipes.rules import in_effect

NAME = "e4m3_linear"
# Targets on which `auto` takes nibble's kernel: they have its NVFP4 kernels too.
TARGETS = ("hopper",)
BF16_ACTIVATIONS = "few rows keep BF16 activations; vLLM's kernel takes more, from the same weight"


def choose_e4m3_linear(inputs: PlanInputs, args: Mapping[str, Choice]) -> Choice | None:
    """`nibble` or `vllm` with the reason; None without FP8 linear layers beside NVFP4 weights.

    args: before the plan has chosen the kernel of NVFP4 layers.
    """
    checkpoint, values = inputs.checkpoint, values_of(args)
    if inputs.target.device != "cuda" or checkpoint is None or not has_e4m3_layers(checkpoint):
        return None
    options = asked(values)
    for name in (NAME, "linear_kernel"):
        if (given := options.get(name)) is not None:
            return _by_user(str(given), args[FLAG].source, inputs, values)
    setting = inputs.loaded.settings.linear_kernel
    source = str(inputs.loaded.origins["linear_kernel"])
    if setting != "auto":
        return _by_user(setting, source, inputs, values)
    if inputs.target.name not in TARGETS:
        return Choice("vllm", source, f"nibble's kernel is made for {' and '.join(TARGETS)}")
    obstacle = _obstacle(inputs, values)
    return Choice("vllm" if obstacle else "nibble", source, obstacle or BF16_ACTIVATIONS)


def e4m3_linear_flags(chosen: Choice | None, args: Mapping[str, Choice]) -> Choices:
    """The flag that gives layers nibble's kernel in the plugin, unless `args` has one."""
    if chosen is None or chosen.value != "nibble" or NAME in asked(values_of(args)):
        return {}
    return {FLAG: Choice({CONFIG_KEY: {NAME: "nibble"}}, chosen.source, REASON)}


def has_e4m3_layers(checkpoint: Checkpoint) -> bool:
    """Whether an NVFP4 checkpoint has E4M3 weights outside experts. Not MXFP8."""
    if not checkpoint.scheme.is_nvfp4:
        return False
    for name, tensor in checkpoint.tensors.items():
        module = name.removesuffix(".weight")
        if tensor.dtype != "F8_E4M3" or module == name or len(tensor.shape) != 2:
            continue
        scale = checkpoint.tensors.get(f"{name}_scale")
        is_expert = EXPERT.match(module) or STACKED_EXPERTS.search(module)
        if not is_expert and (scale is None or scale.dtype != "U8"):
            return True
    return False


def _by_user(value: str, source: str, inputs: PlanInputs, values: Mapping[str, Any]) -> Choice:
    """The user's choice, unless nibble's kernel cannot run."""
    obstacle = _obstacle(inputs, values) if value == "nibble" else ""
    return (
        Choice("vllm", source, obstacle) if obstacle else Choice(value, source, "set by the user")
    )


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

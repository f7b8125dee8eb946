"""--linear-attention: whether nibble's kernels compute linear attention. Pure.

The vLLM plugin gets `on`, or no value, which means vLLM's code. What only a loaded model knows, the
plugin decides (engine/plugin/gated_delta.py): a layer that the kernel does not know keeps vLLM's
code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nibble.checkpoint import Checkpoint
from nibble.checkpoint.layers import layers
from nibble.engine.contract import BATCH_INVARIANT
from nibble.plan.choice import Choice, values_of
from nibble.plan.inputs import PlanInputs
from nibble.plan.nvfp4_options import set_by_user
from nibble.plan.one_order import is_batch_invariant

# Targets on which `auto` takes the kernel.
TARGETS = ("hopper",)
FEW_LAUNCHES = "decode steps of linear attention in one launch, short prompts in four"
_OTHERS = {
    "--speculative-config": "drafts take vLLM's kernels for linear attention",
    "--enable-lora": "adapters may change products of linear attention",
}


def choose_linear_attention(inputs: PlanInputs, args: Mapping[str, Choice]) -> Choice | None:
    """`on` or `off` with the reason; None on the CPU and for models without a gated delta rule."""
    if inputs.target.device != "cuda":
        return None
    values = values_of(args)
    if (given := set_by_user("linear_attention", args)) is not None:
        return given
    if not _has_delta_rule(inputs.checkpoint):
        return None
    source = str(inputs.loaded.origins["linear_attention"])
    obstacle = _obstacle(inputs, values)
    return Choice("off" if obstacle else "on", source, obstacle or FEW_LAUNCHES)


def _has_delta_rule(checkpoint: Checkpoint | None) -> bool:
    found = layers(checkpoint.config) if checkpoint is not None else None
    return any(layer.is_delta_net for layer in found or ())


def _obstacle(inputs: PlanInputs, values: Mapping[str, Any]) -> str:
    """Why `auto` does not take the kernel; empty if nothing prevents it."""
    if inputs.target.name not in TARGETS:
        return f"the kernel for linear attention is the default only on {' and '.join(TARGETS)}"
    if problem := inputs.without_plugin or inputs.without_gpu_kernels:
        return problem
    if is_batch_invariant(inputs.environ):
        return f"with {BATCH_INVARIANT} results must not depend on the batch"
    return next((why for flag, why in _OTHERS.items() if values.get(flag)), "")

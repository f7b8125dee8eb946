"""--attention-front: whether nibble's kernel computes norms of heads, RoPE and cache writes. Pure.

The vLLM plugin gets `on`, or no value, which means vLLM's code. What only a loaded model knows, the
plugin decides (engine/plugin/attention/front.py): a module that the kernel does not know keeps
vLLM's code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nibble.checkpoint import Checkpoint
from nibble.plan.choice import Choice, values_of
from nibble.plan.inputs import PlanInputs
from nibble.plan.nvfp4_options import set_by_user
from nibble.recipes.rules import in_effect

BACKEND = "--attention-backend"
# Targets on which `auto` takes the kernel.
TARGETS = ("hopper",)
# Architectures of vLLM 0.32 whose attention modules the kernel knows.
ARCHITECTURES = frozenset(
    "LlamaForCausalLM MistralForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM"
    " Qwen3MoeForCausalLM".split()
)
ONE_LAUNCH = "norms of heads, RoPE and cache writes in one launch"
_RANKS = ("--decode-context-parallel-size", "--prefill-context-parallel-size")


def choose_attention_front(inputs: PlanInputs, args: Mapping[str, Choice]) -> Choice | None:
    """`on` or `off` with the reason; None on the CPU."""
    if inputs.target.device != "cuda":
        return None
    values = values_of(args)
    if (given := set_by_user("attention_front", args)) is not None:
        return given
    source = str(inputs.loaded.origins["attention_front"])
    obstacle = _obstacle(inputs, values)
    return Choice("off" if obstacle else "on", source, obstacle or ONE_LAUNCH)


def _obstacle(inputs: PlanInputs, values: Mapping[str, Any]) -> str:
    """Why `auto` does not take the kernel; empty if nothing prevents it."""
    if inputs.target.name not in TARGETS:
        return f"the kernel before attention is the default only on {' and '.join(TARGETS)}"
    if problem := inputs.without_plugin or inputs.without_gpu_kernels:
        return problem
    backend = in_effect(BACKEND, values)
    if backend.upper() not in ("AUTO", "FLASH_ATTN"):
        return f"{BACKEND} {backend} is not FlashAttention"
    if any(int(values.get(flag) or 1) > 1 for flag in _RANKS):
        return "a cache that is split over ranks needs keys and values themselves"
    return _problem_of_model(inputs.checkpoint)


def _problem_of_model(checkpoint: Checkpoint | None) -> str:
    if checkpoint is None:
        return "the checkpoint is unknown until pull"
    if checkpoint.architecture not in ARCHITECTURES:
        return f"the kernel before attention does not know {checkpoint.architecture}"
    return ""

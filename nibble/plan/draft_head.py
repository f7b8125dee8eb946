"""--draft-head: whether a drafter reads an NVFP4 copy of its BF16 output head. Pure.

The vLLM plugin gets `nvfp4`, or no value, which means the head as it is. What only loaded models
know, the plugin decides (engine/plugin/draft_head.py): a head that is quantized already stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nibble.checkpoint import Checkpoint
from nibble.checkpoint.nvfp4 import GROUP_SIZE
from nibble.plan.choice import Choice, tensor_parallel_size, values_of
from nibble.plan.inputs import PlanInputs
from nibble.plan.nvfp4_options import UNQUANTIZED, asked, set_by_user, stored_head
from nibble.plan.startup import SPECULATIVE

# Targets on which `auto` takes the copy.
TARGETS = ("hopper",)
MIB = 1 << 20
# Reading a smaller BF16 head takes less time than it takes to launch a kernel or two.
LEAST_BYTES = 32 * MIB
FEWER_BYTES = "drafts read 9/32 of the head's bytes; the target verifies each of them"


def choose_draft_head(
    inputs: PlanInputs, args: Mapping[str, Choice], linear_kernel: Choice | None
) -> Choice | None:
    """`nvfp4` or `bf16` with the reason; None without drafts.

    linear_kernel: the plan's kernel of NVFP4 linear layers.
    """
    values = values_of(args)
    if (given := set_by_user("draft_head", args)) is not None:
        return given
    if not any(values.get(flag) not in (None, False) for flag in SPECULATIVE):
        return None
    source = str(inputs.loaded.origins["draft_head"])
    obstacle = _obstacle(inputs, values, linear_kernel)
    return Choice("bf16" if obstacle else "nvfp4", source, obstacle or FEWER_BYTES)


def draft_head_bytes(checkpoint: Checkpoint | None, args: Mapping[str, Choice]) -> int:
    """What the copy takes on each GPU: half a byte for a weight, and a scale for 16 of them.

    An upper bound: a drafter's separate head is replaced by its copy.
    """
    values = values_of(args)
    options = asked(values)
    if options.get("draft_head") != "nvfp4" or options.get("quantize_lm_head") == "nvfp4":
        return 0
    if not has_head(values) or checkpoint is None or _is_quantized(checkpoint):
        return 0
    return _head_weights(checkpoint, values) * 9 // 16


def has_head(args: Mapping[str, Any]) -> bool:
    """Whether the drafter is an EAGLE or MTP head, as far as the flags say it."""
    method = draft_method(args)
    return method in ("eagle", "eagle3") or "mtp" in method


def draft_method(args: Mapping[str, Any]) -> str:
    """The method of speculative decoding; empty if only vLLM can tell.

    Without a method vLLM finds EAGLE by the draft's name (vllm 0.32 config/speculative.py:1334).
    """
    config = args.get("--speculative-config")
    config = config if isinstance(config, Mapping) else {}
    if method := config.get("method") or args.get("--spec-method"):
        return str(method)
    name = str(config.get("model") or args.get("--spec-model") or "").lower()
    if "eagle-" in name:
        return "eagle"
    return "eagle3" if "eagle3" in name else ""


def _obstacle(inputs: PlanInputs, args: Mapping[str, Any], linear_kernel: Choice | None) -> str:
    """Why `auto` does not take the copy; empty if nothing prevents it."""
    if inputs.target.name not in TARGETS:
        return f"a drafter's head in NVFP4 is the default only on {' and '.join(TARGETS)}"
    if problem := inputs.without_plugin or inputs.without_gpu_kernels:
        return problem
    if not has_head(args):
        method = draft_method(args)
        return f"{method or 'this drafter'} is not known to be an EAGLE or MTP head"
    if inputs.checkpoint is None:
        return "the checkpoint is unknown until pull"
    if linear_kernel is None or linear_kernel.value != "nibble":
        return "the plan has no linear layers in nibble's kernel"
    return _problem_of_model(inputs.checkpoint, args)


def _problem_of_model(checkpoint: Checkpoint, args: Mapping[str, Any]) -> str:
    if (checkpoint.model_type or "").startswith("gemma4"):
        return "Gemma 4's drafter reads rows of its head by cluster"
    if (checkpoint.hidden_size or 0) % GROUP_SIZE:
        return f"the hidden size {checkpoint.hidden_size} is not a multiple of {GROUP_SIZE}"
    size = 2 * _head_weights(checkpoint, args)
    if 0 < size < LEAST_BYTES:
        return f"the head has only {size / MIB:.1f} MiB in BF16; the copy would save no time"
    return ""


def _is_quantized(checkpoint: Checkpoint) -> bool:
    stored = stored_head(checkpoint)
    return stored is not None and stored not in UNQUANTIZED


def _head_weights(checkpoint: Checkpoint, args: Mapping[str, Any]) -> int:
    """Weights of the output head on each GPU; 0 if the config does not say it."""
    weights = (checkpoint.vocab_size or 0) * (checkpoint.hidden_size or 0)
    return weights // tensor_parallel_size(args)

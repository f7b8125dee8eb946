"""--attention-kernel: whether nibble's kernel computes the attention of decode steps. Pure.

The vLLM plugin gets `nibble`, or `few` for steps of few requests, or no value, which means vLLM's
choice (nvfp4_options.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nibble.checkpoint import Checkpoint
from nibble.checkpoint.layer_memory import LayerMemory
from nibble.checkpoint.layers import layers
from nibble.engine.contract import BATCH_INVARIANT, CONFIG_KEY
from nibble.engine.decode_attention import (
    AUTO_CACHES,
    AUTO_HEAD_DIMS,
    WORKSPACE_BYTES,
    AttentionShape,
    most_queries,
    refusal_of_shape,
)
from nibble.engine.decode_attention import FEW as MOST_REQUESTS
from nibble.errors import ExitCode, NibbleError
from nibble.plan.choice import Choice, Choices, tensor_parallel_size, values_of
from nibble.plan.inputs import PlanInputs
from nibble.plan.nvfp4_options import FLAG, REASON, asked
from nibble.plan.one_order import is_batch_invariant
from nibble.plan.startup import SPECULATIVE
from nibble.recipes.rules import in_effect

BACKEND = "--attention-backend"
NIBBLE, FEW = "nibble", "few"  # values of the choice
# Targets where `auto` takes nibble's kernel.
TARGETS: tuple[str, ...] = ("hopper",)
FASTER = (
    "nibble's kernel for decode steps, FlashAttention for prompts"
    " (H200, BF16, 1x1k: 5.1 vs 10.5 µs, 64x1k: 67 vs 77 µs)"
)
SET = {
    NIBBLE: "set by the user; prompts take FlashAttention",
    FEW: f"set by the user; prompts and more than {MOST_REQUESTS} request(s) take FlashAttention",
}
# Backends whose place nibble's may take.
_REPLACED = ("auto", "FLASH_ATTN")
_UNSET = "unset NIBBLE_ATTENTION or drop --attention-kernel"


def attention_kernel_flags(inputs: PlanInputs, args: Mapping[str, Choice]) -> Choices:
    """The flag that selects nibble's kernel where `auto` takes it."""
    values = values_of(args)
    if not _is_auto(inputs, values) or _obstacle(inputs, values):
        return {}
    source = str(inputs.loaded.origins["attention_kernel"])
    return {FLAG: Choice({CONFIG_KEY: {"attention_kernel": NIBBLE}}, source, REASON)}


def obstacle_of_auto(inputs: PlanInputs, values: Mapping[str, Any]) -> str:
    """Why `auto` leaves attention to vLLM on a target of TARGETS; empty elsewhere."""
    return _obstacle(inputs, values) if _is_auto(inputs, values) else ""


def uses_our_attention(values: Mapping[str, Any]) -> bool:
    """Whether the final flags select nibble's kernel."""
    return asked(values).get("attention_kernel") in (NIBBLE, FEW)


def our_choice(inputs: PlanInputs, args: Mapping[str, Choice]) -> Choice:
    """nibble's kernel, with the reason."""
    value = asked(values_of(args))["attention_kernel"]
    is_auto = inputs.loaded.settings.attention_kernel == "auto" and value == NIBBLE
    return Choice(value, args[FLAG].source, FASTER if is_auto else SET[value])


def attention_workspace_bytes(args: Mapping[str, Choice]) -> int:
    """What the kernel's partial results take at most."""
    return WORKSPACE_BYTES if uses_our_attention(values_of(args)) else 0


def check_attention(inputs: PlanInputs, values: Mapping[str, Any]) -> None:
    """Raise CONFIG if nibble's kernel is selected and cannot serve the model."""
    if uses_our_attention(values) and (problem := _problem(inputs, values)):
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"NIBBLE_ATTENTION={asked(values)['attention_kernel']} is set, but {problem}",
            expected="an NVIDIA GPU and a model that nibble's decode attention computes",
            action=_UNSET,
        )


def _is_auto(inputs: PlanInputs, values: Mapping[str, Any]) -> bool:
    is_unset = inputs.loaded.settings.attention_kernel == "auto"
    return is_unset and inputs.target.name in TARGETS and "attention_kernel" not in asked(values)


def _obstacle(inputs: PlanInputs, values: Mapping[str, Any]) -> str:
    """Why `auto` does not take nibble's kernel; empty if nothing prevents it."""
    if problem := inputs.without_plugin or _problem(inputs, values):
        return problem
    if any(values.get(flag) not in (None, False) for flag in SPECULATIVE):
        return "it is not measured with drafts"
    if tensor_parallel_size(values) > 1:
        return "it has not served a model on several GPUs"
    checkpoint = inputs.checkpoint
    if checkpoint is None:
        return "the checkpoint is unknown until pull"
    kept = _layers_with_cache(checkpoint)
    if not kept:
        return "the layers of the model are unknown"
    if any(layer.kind == "sliding" for layer in kept):
        return "it has not served a model with sliding windows"
    if others := {layer.head_dim for layer in kept} - set(AUTO_HEAD_DIMS):
        return f"it is not measured with head dim {', '.join(map(str, sorted(others)))}"
    if (cache := kv_cache_type(checkpoint, values)) not in AUTO_CACHES:
        return f"it has not served a model with a cache in {cache}"
    return ""


def _problem(inputs: PlanInputs, values: Mapping[str, Any]) -> str:
    """Why nibble's kernel cannot serve the model; empty if it can, as far as the plan knows."""
    if inputs.target.device != "cuda":
        return "the CPU has another kernel"
    if inputs.without_gpu_kernels:
        return inputs.without_gpu_kernels
    backend = in_effect(BACKEND, values)
    if backend.upper() not in map(str.upper, _REPLACED):
        return f"{BACKEND} {backend} names another kernel"
    if is_batch_invariant(inputs.environ):
        return f"with {BATCH_INVARIANT} results must not depend on the batch"
    if (dtype := _dtype(inputs.checkpoint, values)) != "bfloat16":
        return f"the model computes in {dtype}"
    if int(values.get("--decode-context-parallel-size") or 1) > 1:
        return "a cache that is split over ranks needs FlashAttention"
    drafts = values.get("--speculative-config")
    count = drafts.get("num_speculative_tokens") if isinstance(drafts, Mapping) else None
    if not most_queries(int(count or 0)):
        return f"{count} tokens are drafted at a time"
    return _problem_of_layers(inputs, values)


def _problem_of_layers(inputs: PlanInputs, values: Mapping[str, Any]) -> str:
    checkpoint = inputs.checkpoint
    if checkpoint is None or layers(checkpoint.config) is None:
        return ""
    kept = _layers_with_cache(checkpoint)
    if not kept:
        return f"no layer of {checkpoint.id} keeps keys and values"
    cache = kv_cache_type(checkpoint, values)
    if cache.startswith("fp8") and inputs.target.name != "hopper":
        return "FlashAttention, which computes prompts, reads an FP8 cache only on hopper"
    heads = checkpoint.num_attention_heads
    for layer in kept:
        if not heads or not layer.num_kv_heads:
            continue
        shape = AttentionShape(layer.head_dim, layer.head_dim_v, heads, layer.num_kv_heads, cache)
        if problem := refusal_of_shape(shape):
            return f"of a layer of {checkpoint.id} {problem}"
    return ""


def kv_cache_type(checkpoint: Checkpoint, values: Mapping[str, Any]) -> str:
    """`--kv-cache-dtype`, else what the checkpoint declares, else `bfloat16`."""
    named = str(values.get("--kv-cache-dtype") or "auto")
    return named if named != "auto" else checkpoint.scheme.kv_cache or "bfloat16"


def _layers_with_cache(checkpoint: Checkpoint) -> list[LayerMemory]:
    found = layers(checkpoint.config) or ()
    return [layer for layer in found if layer.kind in ("full", "sliding") and not layer.is_draft]


def _dtype(checkpoint: Checkpoint | None, values: Mapping[str, Any]) -> str:
    """What the model computes in: with `auto` float16 where the checkpoint has it."""
    named = str(values.get("--dtype") or "auto")
    if named != "auto":
        return named
    is_half = checkpoint is not None and checkpoint.dtype == "float16"
    return "float16" if is_half else "bfloat16"

"""--attention-kernel: whether nibble's kernel computes the attention of decode steps. Pure.

The vLLM plugin gets `nibble`, or no value, which means vLLM's choice (nvfp4_options.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nibble.checkpoint.layers import layers
from nibble.engine.contract import BATCH_INVARIANT, CONFIG_KEY
from nibble.engine.decode_attention import (
    WORKSPACE_BYTES,
    AttentionShape,
    most_queries,
    refusal_of_shape,
)
from nibble.errors import ExitCode, NibbleError
from nibble.plan.choice import Choice, Choices, values_of
from nibble.plan.inputs import PlanInputs
from nibble.plan.nvfp4_options import FLAG, REASON, asked
from nibble.plan.one_order import is_batch_invariant
from nibble.recipes.rules import in_effect

BACKEND = "--attention-backend"
NIBBLE = "nibble"  # the value of the choice
# Targets on which nibble's kernel has served a model faster than vLLM's: `auto` takes it there.
TARGETS: tuple[str, ...] = ()
SERVED = "faster than FlashAttention in a server (docs/kernels/decode_attention.md)"
SET = "set by the user; prompts take FlashAttention"
# Backends whose place nibble's may take.
_REPLACED = ("auto", "FLASH_ATTN")
_UNSET = "unset NIBBLE_ATTENTION or drop --attention-kernel"


def attention_kernel_flags(inputs: PlanInputs, args: Mapping[str, Choice]) -> Choices:
    """The flag that selects nibble's kernel where `auto` takes it."""
    values = values_of(args)
    if inputs.target.name not in TARGETS or "attention_kernel" in asked(values):
        return {}
    setting, source = inputs.loaded.settings.attention_kernel, inputs.loaded.origins
    if setting != "auto" or _problem(inputs, values):
        return {}
    value = {CONFIG_KEY: {"attention_kernel": NIBBLE}}
    return {FLAG: Choice(value, str(source["attention_kernel"]), REASON)}


def uses_our_attention(values: Mapping[str, Any]) -> bool:
    """Whether the final flags select nibble's kernel."""
    return asked(values).get("attention_kernel") == NIBBLE


def our_choice(inputs: PlanInputs, args: Mapping[str, Choice]) -> Choice:
    """nibble's kernel, with the reason."""
    is_auto = inputs.loaded.settings.attention_kernel == "auto" and inputs.target.name in TARGETS
    return Choice(NIBBLE, args[FLAG].source, SERVED if is_auto else SET)


def attention_workspace_bytes(args: Mapping[str, Choice]) -> int:
    """What the kernel's partial results take at most."""
    return WORKSPACE_BYTES if uses_our_attention(values_of(args)) else 0


def check_attention(inputs: PlanInputs, values: Mapping[str, Any]) -> None:
    """Raise CONFIG if nibble's kernel is selected and cannot serve the model."""
    if uses_our_attention(values) and (problem := _problem(inputs, values)):
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"NIBBLE_ATTENTION=nibble is set, but {problem}",
            expected="an NVIDIA GPU and a model that nibble's decode attention computes",
            action=_UNSET,
        )


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
    if int(values.get("--decode-context-parallel-size") or 1) > 1:
        return "a cache that is split over ranks needs FlashAttention"
    drafts = values.get("--speculative-config")
    count = drafts.get("num_speculative_tokens") if isinstance(drafts, Mapping) else None
    if not most_queries(int(count or 0)):
        return f"{count} tokens are drafted at a time"
    return _problem_of_layers(inputs, values)


def _problem_of_layers(inputs: PlanInputs, values: Mapping[str, Any]) -> str:
    checkpoint = inputs.checkpoint
    found = layers(checkpoint.config) if checkpoint is not None else None
    if checkpoint is None or found is None:
        return ""
    kept = [layer for layer in found if layer.kind in ("full", "sliding") and not layer.is_draft]
    if not kept:
        return f"no layer of {checkpoint.id} keeps keys and values"
    named = str(values.get("--kv-cache-dtype") or "auto")
    cache = named if named != "auto" else checkpoint.scheme.kv_cache or "bfloat16"
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

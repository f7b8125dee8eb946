"""--attention-backend and --attention-kernel: which kernels read the KV cache. Pure.

vLLM 0.32 chooses by GPU and model. nibble names another backend only where it was measured to be
faster for decoding and in a server, and none of its limits applies; a backend that a lower or
higher layer names stays. nibble's own kernel is in plan/attention_kernel.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nibble.checkpoint import Checkpoint
from nibble.checkpoint.layer_memory import LayerMemory
from nibble.plan.attention_kernel import (
    kv_cache_type,
    obstacle_of_auto,
    our_choice,
    uses_our_attention,
)
from nibble.plan.choice import OURS, Choice, Choices, values_of
from nibble.plan.inputs import PlanInputs
from nibble.plan.one_order import is_batch_invariant
from nibble.plan.startup import SPECULATIVE
from nibble.recipes.rules import in_effect

FLAG = "--attention-backend"
CONFIG = "--attention-config"
VLLM = "vllm"  # the value of the choice where vLLM decides
FLASHINFER = "FLASHINFER"
# The kernel that was measured: queries in BF16, FlashInfer's own decode kernel on tensor cores.
# Without them vLLM rounds queries to FP8, or takes XQA where it reaches NVIDIA's server (vllm 0.32
# v1/attention/backends/flashinfer.py:990, utils/flashinfer.py:648).
FLASHINFER_CONFIG = {"disable_flashinfer_q_quantization": True, "use_trtllm_attention": False}
_FP8 = ("fp8", "fp8_e4m3")
# Backends with which a server was measured, prompts included. MEASURED has decoding alone.
SERVED: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Measured:
    """The fastest backend for decoding with one form of the KV cache; groups are query heads for
    each KV head.
    """

    gpu: str
    head_dim: int
    is_fp8: bool
    fastest: str
    groups: range
    evidence: str


# µs a call, FlashAttention 3 then FlashInfer, batch x context; 16 query and 2 KV heads for head
# dim 256, 32 and 8 for 128 (2026-11-20, vLLM 0.32.0, FlashInfer 0.7.0.post1, pages of 16).
MEASURED = (
    Measured("H200", 256, True, FLASHINFER, range(4, 17),
             "H200: 1x32k 50.5 vs 28.1 µs, 8x8k 54 vs 37.7, 8x32k 176 vs 106"),
    Measured("H200", 256, False, VLLM, range(1, 17),
             "H200: 1x32k 34.2 vs 33.0 µs, 8x8k 43 vs 46, 8x32k 133 vs 138"),
    Measured("H200", 128, True, VLLM, range(1, 17),
             "H200: 1x32k 34.8 vs 38.7 µs, 8x8k 56 vs 65, 8x32k 192 vs 215"),
    Measured("H200", 128, False, VLLM, range(1, 17),
             "H200: 1x32k 42.9 vs 42.9 µs, 8x8k 71 vs 73, 8x32k 249 vs 253"),
    Measured("H100", 256, True, FLASHINFER, range(4, 17),
             "H100, 8x8k to 32x16k: 38-48 vs 52-84 % of the read bandwidth"),
)  # fmt: skip


def choose_attention(
    inputs: PlanInputs, args: Mapping[str, Choice], step_graph: Choice | None
) -> Choice | None:
    """A backend or `vllm`, with the reason; None on the CPU."""
    if inputs.target.device != "cuda":
        return None
    values = values_of(args)
    if uses_our_attention(values):
        return our_choice(inputs, args)
    if (named := in_effect(FLAG, values)) != "auto":
        source = args[FLAG].source if FLAG in args else args[CONFIG].source
        return Choice(named.upper(), source, "named by this layer")
    if CONFIG in args:
        return Choice(VLLM, OURS, f"{CONFIG} is set, and vLLM chooses with it")
    chosen = _of_vllms(inputs, values, step_graph)
    if (obstacle := obstacle_of_auto(inputs, values)) not in ("", chosen.reason):
        return replace(chosen, reason=f"{chosen.reason}; not nibble's kernel: {obstacle}")
    return chosen


def _of_vllms(inputs: PlanInputs, values: Mapping[str, Any], step_graph: Choice | None) -> Choice:
    found, why = _fastest(inputs, values)
    if found is None:
        return Choice(VLLM, OURS, why)
    reason = f"{found.evidence} (FlashAttention 3 vs FlashInfer)"
    limit = _limit_of_flashinfer(inputs, values, step_graph)
    if found.fastest == FLASHINFER and limit:
        return Choice(VLLM, OURS, f"FlashInfer decodes faster here, but {limit}")
    return Choice(found.fastest, OURS, reason)


def attention_flags(chosen: Choice | None, args: Mapping[str, Choice]) -> Choices:
    """The flags that make vLLM take a backend that nibble chose."""
    if chosen is None or chosen.value != FLASHINFER or in_effect(FLAG, values_of(args)) != "auto":
        return {}
    why = "the kernel that was measured: FlashInfer's own, queries in the model's type"
    return {
        FLAG: Choice(FLASHINFER, chosen.source, chosen.reason),
        CONFIG: Choice(FLASHINFER_CONFIG, chosen.source, why),
    }


def _fastest(inputs: PlanInputs, values: Mapping[str, Any]) -> tuple[Measured | None, str]:
    """The entry for this GPU and model, or why there is none."""
    checkpoint = inputs.checkpoint
    if checkpoint is None:
        return None, "the checkpoint is unknown until pull"
    layers = _attention_layers(checkpoint)
    if not layers:
        return None, "backends were compared only for layers that are known to keep K and V"
    dims = {(layer.head_dim, layer.head_dim_v) for layer in layers}
    if len(dims) > 1:
        return None, "backends were compared only for layers with one head dim"
    head_dim = layers[0].head_dim
    group = (checkpoint.num_attention_heads or 0) // max(1, layers[0].num_kv_heads)
    cache = kv_cache_type(checkpoint, values)
    for entry in MEASURED:
        is_here = inputs.hardware.assumed or _has(inputs, entry.gpu)
        is_like = entry.head_dim == head_dim and entry.is_fp8 == (cache in _FP8)
        if inputs.target.name == "hopper" and is_here and is_like and group in entry.groups:
            return entry, ""
    name = inputs.hardware.gpus[0].name if inputs.hardware.gpus else inputs.target.name
    return None, f"not compared on {name} for head dim {head_dim}, KV cache {cache}, group {group}"


def _has(inputs: PlanInputs, gpu: str) -> bool:
    return bool(inputs.hardware.gpus) and all(
        gpu in one.name.split() for one in inputs.hardware.gpus
    )


def _attention_layers(checkpoint: Checkpoint) -> tuple[LayerMemory, ...]:
    """Layers with K and V; empty if one keeps a latent vector or is unknown."""
    layers = tuple(layer for layer in checkpoint.layers or () if not layer.is_draft)
    if any(layer.kind == "mla" for layer in layers):
        return ()
    return tuple(layer for layer in layers if layer.kind in ("full", "sliding"))


def _limit_of_flashinfer(
    inputs: PlanInputs, values: Mapping[str, Any], step_graph: Choice | None
) -> str:
    """What rules FlashInfer's own kernel out (vllm 0.32 v1/attention/backends/flashinfer.py);
    empty if nothing does.

    It plans on the host, for one query token a sequence, with one window and scale for all layers.
    """
    checkpoint = inputs.checkpoint
    assert checkpoint is not None
    text = checkpoint.text_config
    if step_graph is not None and step_graph.value == "on":
        return "it plans on the host, which steps from CUDA graphs leave out"
    if any(values.get(flag) not in (None, False) for flag in SPECULATIVE):
        return "it decodes one token a sequence, and drafts are verified several at a time"
    if any(layer.kind == "sliding" for layer in _attention_layers(checkpoint)):
        return "it takes one window for all layers"
    if checkpoint.model_type == "gpt_oss" or text.get("attention_sink"):
        return "it has no attention sinks on hopper"
    if int(values.get("--decode-context-parallel-size") or 1) > 1:
        return "context parallelism is not measured with it"
    if is_batch_invariant(inputs.environ):
        return "its order of additions depends on the batch"
    block = values.get("--block-size")
    if block is not None and int(block) % 16:
        return f"it takes pages in multiples of 16, not {block}"
    if inputs.can_compile is False:
        return "it is compiled at the first start, and there is no nvcc here"
    if FLASHINFER not in SERVED:
        return "prompts and servers are not measured with it (--attention-backend FLASHINFER)"
    return ""

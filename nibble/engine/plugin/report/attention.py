"""Compares the attention layers of a warm worker with softmax attention in float32.

Each layer computes a prompt and then one decode step, in the last blocks of the KV cache; the first
requests of a server use the first blocks. Keys and values go through the cache, so the comparison
covers its format and scales. A layer with nibble's kernel before attention does it from rows of
queries, keys and values: norms, RoPE and that kernel's write are compared too. One layer of each
kind is always compared, and further layers within BUDGET_S.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from nibble_kernels.attention_front.reference import prepare, rounded_queries
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.worker.utils import AttentionGroup

from nibble.engine.plugin.attention.front import LayerFront, attend, front_of
from nibble.engine.plugin.report.compare import Result, compare, relative_error
from nibble.engine.plugin.report.formats import generator_of
from nibble.engine.plugin.report.kernels_used import attention_name
from nibble.engine.plugin.report.probes import Unknown

BUDGET_S = 1.0  # for further layers of a known kind
PROMPT_TOKENS = 37  # more than one block of 16 or 32 tokens, and not a multiple of a block


def attention_results(worker: Any) -> Iterator[tuple[Result, Iterable[Result]]]:
    """For each layer to compare: a result without values, and an iterator of its comparisons."""
    until = time.monotonic() + BUDGET_S
    layers, seen = worker.vllm_config.compilation_config.static_forward_context, set()
    for groups in getattr(worker.model_runner, "attn_groups", ()):
        for group in groups:
            for name in group.layer_names:
                layer, kind = layers[name], attention_kind(layers[name])
                if kind not in seen or time.monotonic() < until:
                    seen.add(kind)
                    yield (
                        Result("attention", kind, name),
                        _compare(worker, group, name, layer, kind),
                    )


def attention_kind(layer: Any) -> str:
    """Backend, heads, window and cache format, which determine the kernel."""
    backend = attention_name(layer) if hasattr(layer, "get_attn_backend") else type(layer).__name__
    if not isinstance(layer, Attention):
        return f"{backend} {type(layer).__name__}"
    heads = f"{layer.num_heads} heads of {layer.head_size} on {layer.num_kv_heads}"
    window = f", window {layer.sliding_window}" if layer.sliding_window else ""
    front = " after nibble's front" if front_of(layer) else ""
    return f"{backend} {heads}{window}, cache {layer.kv_cache_dtype}{front}"


def _compare(
    worker: Any, group: AttentionGroup, name: str, layer: Any, kind: str
) -> Iterator[Result]:
    _check_known(worker, group, layer)
    tokens = min(PROMPT_TOKENS, worker.vllm_config.model_config.max_model_len - 1)
    q, k, v = random_heads(name, layer, tokens + 1)
    form = "bf16" if layer.kv_cache_dtype in ("auto", "bfloat16", "float16") else "fp8"
    qkv, front = [value.flatten(1).to(worker.device) for value in (q, k, v)], front_of(layer)
    if front is not None:
        q, k, v = after_front(front, torch.cat((q, k, v), dim=1).flatten(1))
    kept = stored(layer, k, v)
    expected = [softmax_attention(layer, q, *kept)]
    if front is not None and form == "fp8":
        # Norms may make scores large, and then it matters whether queries are rounded to FP8.
        expected.append(softmax_attention(layer, in_fp8(q, layer._q_scale), *kept))
    for first, count in ((0, tokens), (tokens, 1)):
        part = slice(first, first + count)
        rows = [value[part] for value in qkv]
        positions = torch.arange(first, first + count, device=worker.device)

        def call(rows: list[Tensor] = rows, positions: Tensor = positions) -> Tensor:
            return layer(*rows) if front is None else attend(layer, torch.cat(rows, 1), positions)

        y = _forward(worker, group, name, count, first, call)
        nearest = min(
            (right[part] for right in expected), key=partial(relative_error, y.float().cpu())
        )
        yield compare("attention", kind, name, y, {form: nearest})


def after_front(front: LayerFront, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the tokens at the first positions, as attention gets them: on the CPU."""
    weights = front.q_weight, front.k_weight
    q_weight, k_weight = (None if weight is None else weight.cpu() for weight in weights)
    rotation = front.rotation
    return prepare(
        qkv,
        q_weight,
        k_weight,
        front.epsilon,
        torch.arange(len(qkv)),
        rotation.cos_sin_cache[: len(qkv)].cpu(),
        rotation.is_neox_style,
        front.heads,
        front.kv_heads,
    )


def in_fp8(q: Tensor, scale: Tensor) -> Tensor:
    """q in float32, rounded to FP8 as attention may take it."""
    return rounded_queries(q, scale.cpu()).float() * scale.cpu()


def _check_known(worker: Any, group: AttentionGroup, layer: Any) -> None:
    if not isinstance(layer, Attention) or layer.attn_type != AttentionType.DECODER:
        raise Unknown("no reference for this attention")
    impl, parallel = layer.impl, worker.vllm_config.parallel_config
    extras = (
        layer.has_sink,
        getattr(impl, "alibi_slopes", None) is not None,
        layer.kv_sharing_target_layer_name,
    )
    if any(extras) or getattr(impl, "logits_soft_cap", None):
        raise Unknown("no reference for sinks, ALiBi, shared caches or capped logits")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise Unknown("the cache is split over ranks")
    if not (
        layer.kv_cache_dtype in ("auto", "bfloat16", "float16")
        or layer.kv_cache_dtype in ("fp8", "fp8_e4m3")
    ):
        raise Unknown(f"no reference for a cache in {layer.kv_cache_dtype}")
    if group.kernel_block_stride:
        raise Unknown("the cache is packed")


def random_heads(name: str, layer: Any, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k and v: [tokens, heads, head size] in the model's dtype."""
    sizes = (
        (layer.num_heads, layer.head_size),
        (layer.num_kv_heads, layer.head_size),
        (layer.num_kv_heads, layer.head_size_v),
    )
    generator = generator_of(name)
    return tuple(torch.randn(tokens, *size, generator=generator).to(layer.dtype) for size in sizes)  # type: ignore[return-value]


def stored(layer: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v as the cache returns them, in float32."""
    if layer.kv_cache_dtype not in ("fp8", "fp8_e4m3"):
        return k.float(), v.float()
    scales = (layer._k_scale_float, layer._v_scale_float)
    limit = torch.finfo(torch.float8_e4m3fn).max
    return tuple(
        (x.float() / s).clamp(-limit, limit).to(torch.float8_e4m3fn).float() * s
        for x, s in zip((k, v), scales, strict=True)
    )  # type: ignore[return-value]


def softmax_attention(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one sequence: float32 [tokens, heads * head size]."""
    repeat = layer.num_heads // layer.num_kv_heads
    keys, values = (x.repeat_interleave(repeat, dim=1).transpose(0, 1) for x in (k, v))
    scores = q.float().transpose(0, 1) @ keys.transpose(1, 2) * layer.impl.scale
    place = torch.arange(len(q))
    distance = place[:, None] - place[None]
    hidden = (distance < 0) | (distance >= (layer.sliding_window or math.inf))
    return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ values).transpose(0, 1).flatten(1)


def _forward(
    worker: Any,
    group: AttentionGroup,
    name: str,
    count: int,
    computed: int,
    call: Callable[[], Tensor],
) -> Tensor:
    """The result of a layer's call for `count` new tokens after `computed` tokens, with its
    backend's metadata.
    """
    metadata = one_request(worker, group, computed, count)
    context = {
        "attn_metadata": {name: group.build_metadata(metadata, 0)},
        "slot_mapping": {name: metadata.slot_mapping},
    }
    with pass_of_this_worker(worker.vllm_config, count, **context):
        return call()


def pass_of_this_worker(
    config: VllmConfig, tokens: int, **context: Any
) -> AbstractContextManager[None]:
    """The context of a forward pass of `tokens` tokens, with their number given for all data
    parallel replicas.

    Without the numbers, vLLM would ask the replicas in a mixture of experts (vllm 0.32
    forward_context.py:317) and wait forever, because they do not run the same checks.
    """
    replicas = config.parallel_config.data_parallel_size
    everywhere = torch.full((replicas,), tokens, dtype=torch.int32)
    given = {"attn_metadata": None, **context}
    return set_forward_context(
        vllm_config=config, num_tokens=tokens, num_tokens_across_dp=everywhere, **given
    )


def one_request(
    worker: Any, group: AttentionGroup, computed: int, count: int, room: int = PROMPT_TOKENS + 1
) -> CommonAttentionMetadata:
    """Metadata for `count` new tokens of a request with `computed` tokens in the cache.

    The request has the last blocks of the cache, for `room` tokens. Raises Unknown if the cache is
    too small.
    """
    device, size, length = worker.device, group.kv_cache_spec.block_size, computed + count
    config = worker.model_runner.kv_cache_config
    needed = math.ceil(room / size)
    if config.num_blocks <= needed + 1:  # vLLM reserves block 0
        raise Unknown("the KV cache has no blocks to spare")
    width = math.ceil(worker.vllm_config.model_config.max_model_len / size)
    blocks = torch.zeros(1, max(width, needed), dtype=torch.int32)
    blocks[0, :needed] = torch.arange(config.num_blocks - needed, config.num_blocks)
    places = torch.arange(computed, length)
    slots = blocks[0, places // size].long() * size + places % size
    starts, lengths = (
        torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([length], dtype=torch.int32),
    )
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lengths.to(device),
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=1,
        num_actual_tokens=count,
        max_query_len=count,
        max_seq_len=length,
        block_table_tensor=blocks.to(device),
        slot_mapping=slots.to(device),
        positions=places.to(device),
        is_prefilling=torch.tensor([computed == 0]),
        causal=True,
    )

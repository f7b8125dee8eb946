"""nibble::attention_front: norms of queries and keys, RoPE and the write into vLLM's paged cache.

One kernel between the product of queries, keys and values and attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble_kernels.attention_front import reference
from nibble_kernels.library import operator

__all__ = ["attention_front"]


def _reference(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    epsilon: float,
    positions: Tensor,
    cos_sin: Tensor,
    neox: bool,
    heads: int,
    kv_heads: int,
    slots: Tensor | None,
    cache: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    q_scale: Tensor | None,
    out: Tensor,
) -> None:
    q, k, v = reference.prepare(
        qkv, q_weight, k_weight, epsilon, positions, cos_sin, neox, heads, kv_heads
    )
    out.copy_((q if q_scale is None else reference.rounded_queries(q, q_scale)).view_as(out))
    if slots is not None and cache is not None:
        reference.write(k, v, slots, cache, k_scale, v_scale)


def _fake(*arguments: object) -> None:
    return None


_front = operator(
    "attention_front(Tensor qkv, Tensor? q_weight, Tensor? k_weight, float epsilon, Tensor"
    " positions, Tensor cos_sin, bool neox, int heads, int kv_heads, Tensor? slots, Tensor(a!)?"
    " cache, Tensor? k_scale, Tensor? v_scale, Tensor? q_scale, Tensor(b!) out) -> ()",
    _reference,
    _fake,
)


def attention_front(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    heads: int,
    kv_heads: int,
    neox: bool = True,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    epsilon: float = 1e-6,
    slots: Tensor | None = None,
    cache: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Queries [tokens, heads · D] of `qkv` [tokens, (heads + 2 KV heads) · D] in bfloat16, after
    their norm and RoPE; keys, so treated too, and values go to `cache`.

    `cos_sin` [positions, R] has R/2 cosines and then R/2 sines in bfloat16; the first R elements of
    a head are rotated, R a multiple of 16: halves into each other with `neox`, else neighbours.
    `cache` [pages, KV heads, tokens, 2 D] may have any strides, in bfloat16 or float8_e4m3fn (its
    numbers times `k_scale` and `v_scale`). `slots` are int64, of the first tokens; less than 0
    writes nothing. `q_scale` makes the queries float8_e4m3fn. D is 64, 128 or 256.
    """
    if out is None:
        width = heads * (qkv.shape[1] // (heads + 2 * kv_heads))
        dtype = qkv.dtype if q_scale is None else torch.float8_e4m3fn
        out = torch.empty(len(qkv), width, dtype=dtype, device=qkv.device)
    _front(
        qkv,
        q_weight,
        k_weight,
        epsilon,
        positions,
        cos_sin,
        neox,
        heads,
        kv_heads,
        slots,
        cache,
        k_scale,
        v_scale,
        q_scale,
        out,
    )
    return out

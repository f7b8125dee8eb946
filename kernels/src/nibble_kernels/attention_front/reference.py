"""What comes before attention, in plain torch: the specification of the compiled kernel.

The arithmetic is that of vLLM 0.32's kernels for CUDA: rms_norm, rotary_embedding and
reshape_and_cache_flash, one after the other. Each computes in float32 and rounds once.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
EACH = 8  # neighbouring elements of a head that are added up one after the other


def prepare(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    epsilon: float,
    positions: Tensor,
    cos_sin: Tensor,
    neox: bool,
    heads: int,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [tokens, heads, D], k and v [tokens, KV heads, D], in bfloat16."""
    by_head = qkv.unflatten(1, (heads + 2 * kv_heads, -1))
    q, k, v = by_head.split([heads, kv_heads, kv_heads], dim=1)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, epsilon), rms_norm(k, k_weight, epsilon)
    rows = cos_sin[positions]
    return rotate(q, rows, neox), rotate(k, rows, neox), v


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The norm of the last dimension, with the order of vLLM's sum."""
    values = x.float()
    squares = (values * values).unflatten(-1, (-1, EACH))
    sums = squares[..., 0]
    for i in range(1, EACH):
        sums = sums + squares[..., i]
    while sums.shape[-1] > 1:
        sums = sums[..., 0::2] + sums[..., 1::2]
    inverse = torch.rsqrt(sums / x.shape[-1] + epsilon)
    return (values * inverse * weight.float()).to(x.dtype)


def rotate(x: Tensor, cos_sin: Tensor, neox: bool) -> Tensor:
    """RoPE of the first elements of each head; cos_sin [tokens, cosines and then sines]."""
    cosines, sines = cos_sin.float().unsqueeze(1).chunk(2, dim=-1)
    width = cos_sin.shape[-1]
    part, rest = x[..., :width].float(), x[..., width:]
    if neox:
        a, b = part.chunk(2, dim=-1)
    else:
        a, b = part[..., 0::2], part[..., 1::2]
    turned = (a * cosines - b * sines, b * cosines + a * sines)
    joined = torch.cat(turned, dim=-1) if neox else torch.stack(turned, dim=-1).flatten(-2)
    return torch.cat((joined.to(x.dtype), rest), dim=-1)


def write(
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Write keys and values of the first tokens to the slots that are not negative; cache [pages,
    KV heads, tokens, 2 D].
    """
    parts = (k, k_scale), (v, v_scale)
    rows = torch.cat([as_stored(x[: len(slots)], scale, cache.dtype) for x, scale in parts], dim=-1)
    used = slots >= 0
    pages, tokens = slots[used] // cache.shape[2], slots[used] % cache.shape[2]
    raw = torch.uint8 if cache.dtype == FP8 else torch.bfloat16  # FP8 cannot be indexed
    cache.view(raw)[pages, :, tokens] = rows[used].view(raw)


def as_stored(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x in the type of a cache, divided by the scale for FP8."""
    if dtype != FP8:
        return x
    assert scale is not None, "a cache in float8_e4m3fn needs scales"
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(FP8)


def rounded_queries(q: Tensor, scale: Tensor) -> Tensor:
    """q in FP8, as vLLM's scaled_fp8_quant rounds it."""
    return (q.float() * (1 / scale)).clamp(-LARGEST, LARGEST).to(FP8)

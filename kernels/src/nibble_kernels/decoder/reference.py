"""A dense decoder's layers in plain torch: the specification.

Rounded to bfloat16 where vLLM's modules round: after each product, norm, rotation and attention,
after silu, and after its product with up. A norm reads the sum of hidden states and residual before
it is rounded.
"""

from __future__ import annotations

import math
from itertools import islice, pairwise

import torch
from torch import Tensor

from nibble_kernels.decoder.layer import DecoderLayer, Product, Shape
from nibble_kernels.nvfp4_linear.packed import PackedWeight, nvfp4_packed_linear

_PRODUCT, _LAYER = 6, 28  # tensors
_shapes: dict[int, Shape] = {}
_decoders: dict[int, tuple[list[DecoderLayer], Tensor, Tensor]] = {}


def remember_shape(decoder: int, shape: Shape) -> None:
    _shapes[decoder] = shape


def shape_of(decoder: int) -> Shape:
    return _shapes[decoder]


def new(
    tensors: list[Tensor],
    layers: int,
    hidden: int,
    intermediate: int,
    queries: int,
    keys: int,
    head_size: int,
    epsilon: float,
    scale: float,
) -> int:
    number = max(_decoders, default=-1) + 1
    shape = Shape(hidden, intermediate, queries, keys, head_size, epsilon, scale)
    remember_shape(number, shape)
    rows = (shape.qkv_width, hidden, 2 * intermediate, hidden)
    found = [_layer(tensors[at : at + _LAYER], rows) for at in range(0, layers * _LAYER, _LAYER)]
    _decoders[number] = found, tensors[-2], tensors[-1]
    return number


def _layer(tensors: list[Tensor], rows: tuple[int, ...]) -> DecoderLayer:
    following = iter(tensors)
    products = []
    for count in rows:
        codes, scales, global_scale, *optional = islice(following, _PRODUCT)
        given = (x if x.numel() else None for x in optional)
        products.append(Product(PackedWeight(codes, scales, count), global_scale, *given))
    return DecoderLayer(*products, *(norm if norm.numel() else None for norm in following))


def delete(like: Tensor, decoder: int) -> None:
    _decoders.pop(decoder, None)


def before_attention(
    decoder: int, layer: int, hidden: Tensor | None, residual: Tensor, positions: Tensor
) -> Tensor:
    layers, _, cos_sin = _decoders[decoder]
    shape, own = _shapes[decoder], layers[layer]
    normalized = add_and_normalize(hidden, residual, own.input_norm, shape.epsilon)
    qkv = product(normalized, own.qkv).unflatten(-1, (-1, shape.head_size))
    queries, keys = shape.queries, shape.keys
    parts = [
        normalize_and_rotate(qkv[:, :queries], own.query_norm, shape, cos_sin[positions]),
        normalize_and_rotate(
            qkv[:, queries : queries + keys], own.key_norm, shape, cos_sin[positions]
        ),
        qkv[:, queries + keys :],
    ]
    return torch.cat(parts, dim=1).flatten(1)


def after_attention(decoder: int, layer: int, attention: Tensor, residual: Tensor) -> Tensor:
    shape, own = _shapes[decoder], _decoders[decoder][0][layer]
    added = product(attention, own.output)
    normalized = add_and_normalize(added, residual, own.output_norm, shape.epsilon)
    gate, up = product(normalized, own.gate_up).chunk(2, dim=-1)
    return product(torch.nn.functional.silu(gate) * up, own.down)


def last_norm(decoder: int, hidden: Tensor, residual: Tensor) -> Tensor:
    return add_and_normalize(hidden, residual, _decoders[decoder][1], _shapes[decoder].epsilon)


def step(
    decoder: int,
    residual: Tensor,
    positions: Tensor,
    caches: list[Tensor],
    slots: Tensor,
    blocks: Tensor,
    lengths: Tensor,
    window: int,
    starts: Tensor | None = None,
) -> Tensor:
    shape, hidden = _shapes[decoder], None
    starts = torch.arange(len(residual) + 1) if starts is None else starts
    new_tokens = [
        (sequence, row, int(lengths[sequence]) - int(end) + row + 1)
        for sequence, (begin, end) in enumerate(pairwise(starts))
        for row in range(int(begin), int(end))
    ]
    for layer, cache in enumerate(caches):
        qkv = before_attention(decoder, layer, hidden, residual, positions)
        heads = qkv.unflatten(-1, (-1, shape.head_size))
        queries, keys, values = heads.split([shape.queries, shape.keys, shape.keys], dim=1)
        rows = []
        for row in range(len(residual)):
            if slots[row] >= 0:
                write_cache(cache, int(slots[row]), keys[row], values[row])
        for sequence, row, length in new_tokens:
            first = max(0, length - window) if window > 0 else 0
            of_sequence = read_cache(cache, blocks[sequence], length)
            seen_keys, seen_values = (x[first:length] for x in of_sequence)
            rows.append(attention(queries[row], seen_keys, seen_values, shape.scale))
        hidden = after_attention(decoder, layer, torch.stack(rows).flatten(1), residual)
    assert hidden is not None
    return last_norm(decoder, hidden, residual)


def product(x: Tensor, factors: Product) -> Tensor:
    return nvfp4_packed_linear(
        x,
        factors.weight,
        factors.global_scale,
        column_scale=factors.column_scale,
        bias=factors.bias,
        input_scale_inv=factors.input_scale_inv,
    )


def add_and_normalize(
    added: Tensor | None, residual: Tensor, weight: Tensor, epsilon: float
) -> Tensor:
    x = residual.float() if added is None else added.float() + residual.float()
    residual.copy_(x)
    return normalize(x, weight, epsilon)


def normalize(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x: float32."""
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    return x.to(weight.dtype) * weight


def normalize_and_rotate(x: Tensor, norm: Tensor | None, shape: Shape, cos_sin: Tensor) -> Tensor:
    """x: [rows, heads, head size]; cos_sin: [rows, rotated columns]."""
    if norm is not None:
        x = normalize(x.float(), norm, shape.epsilon)
    cos, sin = cos_sin.float()[:, None].chunk(2, dim=-1)
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, shape.head_size - 2 * half], dim=-1)
    first, second = first.float(), second.float()
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([*(part.to(x.dtype) for part in rotated), rest], dim=-1)


def attention(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One token: queries [heads, size], keys and values [tokens, key heads, size]."""
    each = len(queries) // keys.shape[1]
    keys, values = (
        x.float().repeat_interleave(each, dim=1).transpose(0, 1) for x in (keys, values)
    )
    if not keys.shape[1]:
        return torch.zeros_like(queries)
    scores = (queries.float()[:, None] * scale) @ keys.transpose(1, 2)
    return (scores.softmax(-1) @ values)[:, 0].to(queries.dtype)


def halves(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a cache: keys [blocks, heads, size, tokens] and values by token."""
    blocks, heads, tokens, both = cache.shape
    keys, values = cache.view(blocks, heads, 2, tokens * both // 2).unbind(2)
    return keys.unflatten(-1, (-1, tokens)), values.unflatten(-1, (tokens, -1))


def write_cache(cache: Tensor, slot: int, key: Tensor, value: Tensor) -> None:
    """key and value: [heads, size]."""
    keys, values = halves(cache)
    block, token = divmod(slot, cache.shape[2])
    keys[block, :, :, token] = key
    values[block, :, token] = value


def read_cache(cache: Tensor, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values [tokens, heads, size] of a sequence."""
    used = blocks[: math.ceil(length / cache.shape[2])].long()
    keys, values = halves(cache)
    return (
        keys[used].permute(0, 3, 1, 2).flatten(0, 1),
        values[used].transpose(1, 2).flatten(0, 1),
    )

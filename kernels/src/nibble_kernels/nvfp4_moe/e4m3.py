"""nibble::e4m3_moe_decode_linear and e4m3_weight_moe: E4M3 experts with unquantized activations on
NVIDIA GPUs.

The layout is that of nvfp4_linear/weight.py with a byte for each column: a lane of a warp has 32
columns of row r and of row r + N / 2, as twice 16 bytes each. In each word the two middle columns
have changed places, from which few operations give bfloat16. A tile has one float32 scale for its
rows of the upper half and one for those of the lower, because blocks of scales have a multiple of 8
rows and of 128 columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nibble_kernels.library import operator
from nibble_kernels.nvfp4_linear import shape
from nibble_kernels.nvfp4_linear.weight import GROUP, QUARTERS
from nibble_kernels.nvfp4_moe.gpu import grouped_by_torch, in_slices, pairs_reference, takes_slices

CHUNK = 128
PIECE = 16  # bytes that a lane fetches at once
SWAPPED = [0, 2, 1, 3]  # columns in a word; its own inverse
NAN = 0x7F


class E4m3Experts(NamedTuple):
    """The prepared weights of E experts of `rows` rows.

    codes: uint8 [E, groups, chunks, 4, 32, 16]; scales: float32 [E, groups, chunks, 2] of tiles;
    global_scales: float32 [E, 2], one for each half of the rows; row_scales: float32 [E, rows] or
    none. A weight is its code times all of them.
    """

    codes: Tensor
    scales: Tensor
    global_scales: Tensor
    row_scales: Tensor | None
    rows: int


def prepare_e4m3_experts(
    weight: Tensor,
    scale: Tensor,
    *,
    block: tuple[int, int] | None = None,
    parts: int = 1,
) -> E4m3Experts:
    """Rearrange weights, float8_e4m3fn [E, N, K], into new tensors.

    scale, float32: of experts [E], of both halves of their rows [E, 2], of rows [E, N, 1], or with
    `block` [E, parts · ceil(N / parts / block[0]), ceil(K / block[1])], where each of the `parts`
    (gate and up) has its own blocks. N and K must be multiples of 16. Raises ValueError for other
    dtypes or shapes, and for a weight that is NaN.
    """
    if weight.ndim != 3 or weight.dtype != torch.float8_e4m3fn:
        raise ValueError(f"expected float8_e4m3fn [E, N, K]; got {weight.dtype} {shape(weight)}")
    experts, rows, columns = weight.shape
    if rows % (2 * GROUP) or columns % PIECE:
        raise ValueError(f"experts must have rows and columns in 16s; got {rows} x {columns}")
    groups, chunks = rows // 2 // GROUP, -(-columns // CHUNK)
    codes = weight.new_empty((experts, groups, chunks, 4, 32, PIECE), dtype=torch.uint8)
    for expert, stored in enumerate(weight.view(torch.uint8)):
        if ((stored & NAN) == NAN).any():
            raise ValueError(f"a weight of expert {expert} is NaN")
        codes[expert] = _tiles(stored, groups, chunks)
    tiles = scale.new_ones((experts, groups, chunks, 2), dtype=torch.float32)
    both = tiles.new_ones((experts, 2))
    if block is not None:
        tiles = _tile_scales(scale.float(), rows, chunks, block, parts)
    elif scale.shape == (experts, rows, 1):
        return E4m3Experts(codes, tiles, both, scale.float().flatten(1).contiguous(), rows)
    elif scale.shape in ((experts,), (experts, 1), (experts, 2)):
        both = scale.float().reshape(experts, -1).expand(-1, 2).contiguous()
    else:
        raise ValueError(f"scales of {shape(scale)} do not fit experts of {shape(weight)}")
    return E4m3Experts(codes, tiles, both, None, rows)


def _tiles(stored: Tensor, groups: int, chunks: int) -> Tensor:
    rows, columns = stored.shape
    padded = stored.new_zeros((rows, chunks * CHUNK))
    padded[:, :columns] = stored
    words = padded.unflatten(1, (-1, 4))[..., SWAPPED]
    # Half, group, row, chunk, quarter, 16 bytes of a lane.
    lanes = words.reshape(2, groups, GROUP, chunks, QUARTERS, 2, PIECE)
    return lanes.permute(1, 3, 0, 5, 2, 4, 6).reshape(groups, chunks, 4, 32, PIECE)


def _tile_scales(
    scale: Tensor, rows: int, chunks: int, block: tuple[int, int], parts: int
) -> Tensor:
    height, width = block
    if height % GROUP or width % CHUNK or rows // parts % GROUP:
        raise ValueError(
            f"blocks of scales of {height} x {width} are not supported; expected rows in {GROUP}s"
            f" and columns in {CHUNK}s"
        )
    each = rows // parts
    expected = (parts * -(-each // height), -(-chunks * CHUNK // width))
    if scale.shape[1:] != expected:
        raise ValueError(f"expected scales [E, {expected[0]}, {expected[1]}]; got {shape(scale)}")
    of_rows = scale.unflatten(1, (parts, -1)).repeat_interleave(height, 2)[:, :, :each:GROUP]
    of_tiles = of_rows.repeat_interleave(width // CHUNK, 3)[..., :chunks]
    return of_tiles.flatten(1, 2).unflatten(1, (2, -1)).permute(0, 2, 3, 1).contiguous()


def stored_values(weight: E4m3Experts, columns: int) -> Tensor:
    """The codes of prepared experts as float8_e4m3fn [E, N, K]."""
    experts, groups, chunks = weight.codes.shape[:3]
    lanes = weight.codes.reshape(experts, groups, chunks, 2, 2, GROUP, QUARTERS, PIECE)
    rows = lanes.permute(0, 3, 1, 5, 2, 6, 4, 7).reshape(experts, weight.rows, -1, 4)
    stored = rows[..., SWAPPED].flatten(2)[..., :columns]
    return stored.contiguous().view(torch.float8_e4m3fn)


def _values(weight: E4m3Experts, columns: int, dtype: torch.dtype) -> Tensor:
    """The weights without global and row scales, [E, N, K]. Temporary memory is one byte more for
    each.
    """
    values = stored_values(weight, columns).to(dtype)
    of_rows = weight.scales.permute(0, 3, 1, 2).repeat_interleave(GROUP, 2).flatten(1, 2)
    full = columns // CHUNK * CHUNK
    values[..., :full].unflatten(2, (-1, CHUNK)).mul_(of_rows[..., : full // CHUNK, None])
    values[..., full:].mul_(of_rows[..., -1:])
    return values


def _factors(weight: E4m3Experts, expert: Tensor | int) -> Tensor:
    """What sums of these experts are multiplied with, [..., N]."""
    factors = weight.global_scales[expert].repeat_interleave(weight.rows // 2, -1)
    return factors if weight.row_scales is None else factors * weight.row_scales[expert]


def _reference(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    global_scales: Tensor,
    row_scales: Tensor | None,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    rows: int,
    silu_mul: bool,
) -> Tensor:
    experts = E4m3Experts(codes, scales, global_scales, row_scales, rows)
    values = _values(experts, x.shape[-1], torch.float32)

    def product(inputs: Tensor, expert: int) -> Tensor:
        return inputs @ values[expert].T * _factors(experts, expert)

    return pairs_reference(x, topk_ids, topk_weights, len(codes), rows, silu_mul, product)


_decode = operator(
    "e4m3_moe_decode_linear(Tensor x, Tensor codes, Tensor scales, Tensor global_scales, Tensor?"
    " row_scales, Tensor topk_ids, Tensor? topk_weights, int rows, bool silu_mul) -> Tensor",
    _reference,
    lambda x, codes, scales, global_scales, row_scales, topk_ids, topk_weights, rows, silu_mul: (
        x.new_empty((topk_ids.numel(), rows // (2 if silu_mul else 1)))
    ),
)


def e4m3_moe_decode_linear(
    x: Tensor,
    experts: E4m3Experts,
    topk_ids: Tensor,
    *,
    topk_weights: Tensor | None = None,
    silu_mul: bool = False,
) -> Tensor:
    """As nvfp4_moe_decode_linear, for E4M3 experts and bfloat16 x. Sums of 128 columns are scaled
    in float32.
    """
    *parts, rows = experts
    return _decode(x, *parts, topk_ids, topk_weights, rows, silu_mul)


def _weight_moe(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13_codes: Tensor,
    w13_scales: Tensor,
    w13_global_scales: Tensor,
    w13_row_scales: Tensor | None,
    w13_rows: int,
    w2_codes: Tensor,
    w2_scales: Tensor,
    w2_global_scales: Tensor,
    w2_row_scales: Tensor | None,
    w2_rows: int,
) -> Tensor:
    w13 = E4m3Experts(w13_codes, w13_scales, w13_global_scales, w13_row_scales, w13_rows)
    w2 = E4m3Experts(w2_codes, w2_scales, w2_global_scales, w2_row_scales, w2_rows)

    def product(rows: Tensor, is_first: bool, ends: Tensor, expert: Tensor) -> Tensor:
        weight = w13 if is_first else w2
        values = _values(weight, rows.shape[1], rows.dtype).transpose(1, 2)
        sums = torch.nn.functional.grouped_mm(rows, values, offs=ends)
        return sums * _factors(weight, expert)

    if not takes_slices(*topk_ids.shape):
        return grouped_by_torch(x, topk_weights, topk_ids, len(w13_codes), product)

    def decode(part: Tensor, ids: Tensor, weights: Tensor | None) -> Tensor:
        if weights is None:
            return e4m3_moe_decode_linear(part, w13, ids, silu_mul=True)
        return e4m3_moe_decode_linear(part, w2, ids, topk_weights=weights)

    return in_slices(x, topk_weights, topk_ids, len(w13_codes), decode)


_moe = operator(
    "e4m3_weight_moe(Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor w13_codes, Tensor"
    " w13_scales, Tensor w13_global_scales, Tensor? w13_row_scales, int w13_rows, Tensor w2_codes,"
    " Tensor w2_scales, Tensor w2_global_scales, Tensor? w2_row_scales, int w2_rows) -> Tensor",
    _weight_moe,
    lambda x, *rest: torch.empty_like(x),
)


def e4m3_weight_moe(
    x: Tensor, topk_weights: Tensor, topk_ids: Tensor, w13: E4m3Experts, w2: E4m3Experts
) -> Tensor:
    """The sum of the experts' outputs times topk_weights [T, k], [T, H], for x bfloat16 [T, H].

    w13: gate's rows and then up's, with silu · mul between the products. topk_ids: as in
    nvfp4_moe_decode_linear. Up to MAX_DECODE_TOKENS tokens, decode kernels read the experts in use,
    64 pairs at a time. For more tokens, all experts are dequantized into a temporary tensor, where
    the scales of blocks are rounded into the weights, and torch multiplies.
    """
    ids, weights = topk_ids.to(torch.int32), topk_weights.to(torch.float32)
    return _moe(x.contiguous(), weights, ids, *w13, *w2)

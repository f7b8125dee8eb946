"""nibble::nvfp4_moe_decode_linear and nvfp4_weight_moe: NVFP4 experts with unquantized activations
on NVIDIA GPUs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from nibble_kernels.library import operator
from nibble_kernels.nvfp4_linear.gpu import nvfp4_dequantize_weight
from nibble_kernels.nvfp4_linear.reference import matmul
from nibble_kernels.nvfp4_linear.weight import PreparedWeight, stored_weight
from nibble_kernels.nvfp4_moe.grouped import (
    FUNCTIONS,
    MAX_EXPERTS,
    NOT_SHARED,
    SHARED_SCHEMA,
    SILU,
    SharedExpert,
    moe_linear_operator,
)
from nibble_kernels.nvfp4_moe.weight import PreparedExperts

__all__ = [
    "MAX_DECODE_TOKENS",
    "MAX_PAIRS",
    "MAX_TOKENS",
    "nvfp4_moe_add_up",
    "nvfp4_moe_decode_linear",
    "nvfp4_weight_moe",
]

MAX_PAIRS, MAX_TOKENS = 64, 16
# Above this number torch multiplies dequantized copies of all experts. Derived from an estimate and
# not measured: docs/kernels/nvfp4_linear.md.
MAX_DECODE_TOKENS = 128


def _reference(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    global_scales: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    rows: int,
    native: bool,
    silu_mul: bool,
) -> Tensor:

    def product(inputs: Tensor, expert: int) -> Tensor:
        weight = PreparedWeight(codes[expert], scales[expert], rows, native)
        sums = matmul(inputs, *stored_weight(weight, x.shape[-1]))
        return sums * global_scales[expert].repeat_interleave(rows // 2)

    return pairs_reference(x, topk_ids, topk_weights, len(codes), rows, silu_mul, product)


def pairs_reference(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    experts: int,
    rows: int,
    silu_mul: bool,
    product: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """The specification of a decode kernel: float32 throughout, rounded once at the end.

    product: float32 rows [P, K] times the weight of one expert, [P, rows].
    """
    ids = topk_ids.reshape(-1)
    inputs = x.repeat_interleave(len(ids) // max(len(x), 1), 0).float()
    y = torch.zeros(len(ids), rows // (2 if silu_mul else 1), dtype=torch.float32, device=x.device)
    for expert in ids[(ids >= 0) & (ids < experts)].unique().tolist():
        pairs = ids == expert
        sums = product(inputs[pairs], expert)
        if silu_mul:
            gate, up = sums.chunk(2, dim=-1)
            sums = torch.nn.functional.silu(gate) * up
        y[pairs] = sums if topk_weights is None else sums * topk_weights.reshape(-1)[pairs, None]
    return y.to(x.dtype)


_decode = operator(
    "nvfp4_moe_decode_linear(Tensor x, Tensor codes, Tensor scales, Tensor global_scales, Tensor"
    " topk_ids, Tensor? topk_weights, int rows, bool native, bool silu_mul) -> Tensor",
    _reference,
    lambda x, codes, scales, global_scales, topk_ids, topk_weights, rows, native, silu_mul: (
        x.new_empty((topk_ids.numel(), rows // (2 if silu_mul else 1)))
    ),
)


def nvfp4_moe_decode_linear(
    x: Tensor,
    experts: PreparedExperts,
    topk_ids: Tensor,
    *,
    topk_weights: Tensor | None = None,
    silu_mul: bool = False,
) -> Tensor:
    """One product for each pair of a token and one of its experts: [T·k, N], or [T·k, N/2] with
    silu_mul, times topk_weights if given.

    x: one row per token, or one per pair (the result of the first product); topk_ids: int32 [T, k];
    topk_weights: float32 [T, k]. At most MAX_TOKENS tokens and MAX_PAIRS pairs, and a token must
    not have an expert twice. A negative or too large id is an expert of another process and gives
    zeros. Each expert's weights are read only once.
    """
    codes, scales, global_scales, rows, native = experts
    return _decode(x, codes, scales, global_scales, topk_ids, topk_weights, rows, native, silu_mul)


def _sum_reference(products: Tensor, topk_ids: Tensor, experts: int) -> Tensor:
    is_here = ((topk_ids >= 0) & (topk_ids < experts))[..., None]
    values = products.unflatten(0, topk_ids.shape)
    return torch.where(is_here, values, 0.0).sum(1, dtype=torch.float32).to(products.dtype)


_add_up = operator(
    "nvfp4_moe_add_up(Tensor products, Tensor topk_ids, int experts) -> Tensor",
    _sum_reference,
    lambda products, topk_ids, experts: products.new_empty((len(topk_ids), products.shape[1])),
)


def nvfp4_moe_add_up(products: Tensor, topk_ids: Tensor, experts: int) -> Tensor:
    """[T, N]: the sum of each token's products [T·k, N] in the order of its ids [T, k], in float32
    and rounded once. Products of ids that are negative or not below `experts` are not read.
    """
    return _add_up(products, topk_ids, experts)


def _weight_moe(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13_codes: Tensor,
    w13_scales: Tensor,
    w13_global_scales: Tensor,
    w13_bias: Tensor | None,
    w13_rows: int,
    w2_codes: Tensor,
    w2_scales: Tensor,
    w2_global_scales: Tensor,
    w2_bias: Tensor | None,
    w2_rows: int,
    native: bool,
    function: int,
    gated: bool,
    limit: float,
    alpha: float,
    beta: float,
    shared_weights: Tensor | None,
    *shared: Tensor | None,
) -> Tensor:
    w13 = PreparedExperts(w13_codes, w13_scales, w13_global_scales, w13_rows, native)
    w2 = PreparedExperts(w2_codes, w2_scales, w2_global_scales, w2_rows, native)
    tokens, topk = topk_ids.shape
    activation = (function, gated, limit, alpha, beta)
    is_plain = activation == SILU and w13_bias is None and w2_bias is None
    if _uses_tiles(x, len(w13_codes)) or not is_plain or shared_weights is not None:
        parts = (*w13[:3], w13_bias, w13_rows, *w2[:3], w2_bias, w2_rows, *activation)
        return moe_linear_operator(x, topk_weights, topk_ids, *parts, shared_weights, *shared, 0)
    if not takes_slices(tokens, topk):

        def product(rows: Tensor, is_first: bool, ends: Tensor, expert: Tensor) -> Tensor:
            weight = w13 if is_first else w2
            parts = PreparedWeight(weight.codes, weight.scales, weight.rows, weight.native)
            values = nvfp4_dequantize_weight(parts, rows.shape[1], rows).transpose(1, 2)
            sums = torch.nn.functional.grouped_mm(rows, values, offs=ends)
            halves = sums.unflatten(1, (2, -1)) * weight.global_scales[expert, :, None]
            return halves.flatten(1)

        return grouped_by_torch(x, topk_weights, topk_ids, len(w13_codes), product)

    def decode(rows: Tensor, ids: Tensor, weights: Tensor | None) -> Tensor:
        if weights is None:
            return nvfp4_moe_decode_linear(rows, w13, ids, silu_mul=True)
        return nvfp4_moe_decode_linear(rows, w2, ids, topk_weights=weights)

    return in_slices(x, topk_weights, topk_ids, len(w13_codes), decode)


@functools.cache
def _has_tiles(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def _uses_tiles(x: Tensor, experts: int) -> bool:
    if not x.is_cuda or experts > MAX_EXPERTS:
        return False
    return _has_tiles(x.get_device())


def takes_slices(tokens: int, topk: int) -> bool:
    """Whether the decode kernels multiply, else torch."""
    return tokens <= MAX_DECODE_TOKENS and topk <= MAX_PAIRS


def in_slices(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    count: int,
    decode: Callable[[Tensor, Tensor, Tensor | None], Tensor],
) -> Tensor:
    """Multiply as many tokens at a time as the decode kernels take. decode(rows, ids, None) is the
    first product with its activation, decode(rows, ids, weights) the second; count: of experts.
    """
    step = min(MAX_TOKENS, MAX_PAIRS // topk_ids.shape[1])
    sums = []
    for part in (slice(begin, begin + step) for begin in range(0, len(x), step)):
        ids = topk_ids[part]
        y = decode(decode(x[part], ids, None), ids, topk_weights[part])
        sums.append(nvfp4_moe_add_up(y, ids, count))
    return sums[0] if len(sums) == 1 else torch.cat(sums) if sums else torch.empty_like(x)


def grouped_by_torch(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    count: int,
    product: Callable[[Tensor, bool, Tensor, Tensor], Tensor],
) -> Tensor:
    """Multiply the pairs sorted by expert, with pairs of other processes' experts last.

    product(rows, is_first, ends, expert): the scaled sums of rows, where an expert's end at its
    number in `ends` and a row's expert is in `expert`. Does not synchronize with the GPU, so CUDA
    graphs can capture it.
    """
    ids, topk = topk_ids.flatten(), topk_ids.shape[1]
    ids = torch.where((ids >= 0) & (ids < count), ids, count)
    ids, order = ids.sort(stable=True)
    ends = torch.searchsorted(
        ids, torch.arange(count, device=x.device, dtype=ids.dtype), right=True
    ).int()
    is_local, expert = (ids < count)[:, None], ids.clamp(max=count - 1)
    gate, up = product(x[order // topk], True, ends, expert).chunk(2, dim=-1)
    h = (torch.nn.functional.silu(gate) * up).to(x.dtype)
    sums = product(h, False, ends, expert) * topk_weights.flatten()[order, None]
    # grouped_mm does not write rows after the last group.
    y = torch.where(is_local, sums, 0.0)
    return torch.empty_like(y).index_copy_(0, order, y).unflatten(0, (-1, topk)).sum(1).to(x.dtype)


_moe = operator(
    "nvfp4_weight_moe(Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor w13_codes, Tensor"
    " w13_scales, Tensor w13_global_scales, Tensor? w13_bias, int w13_rows, Tensor w2_codes, Tensor"
    " w2_scales, Tensor w2_global_scales, Tensor? w2_bias, int w2_rows, bool native, int function,"
    f" bool gated, float limit, float alpha, float beta, {SHARED_SCHEMA}) -> Tensor",
    _weight_moe,
    lambda x, *rest: torch.empty_like(x),
)


def nvfp4_weight_moe(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13: PreparedExperts,
    w2: PreparedExperts,
    *,
    function: str = "silu",
    gated: bool = True,
    limit: float = math.inf,
    alpha: float = 1.0,
    beta: float = 0.0,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    shared: SharedExpert | None = None,
) -> Tensor:
    """The sum of the experts' outputs times topk_weights [T, k], [T, H], for x bfloat16 [T, H].

    topk_ids: as in nvfp4_moe_decode_linear; w13: gate's rows and then up's, with the activation of
    nvfp4_moe_linear between the products; biases and shared: as there. One operator, which chooses
    when it runs. On SM90, nvfp4_moe_linear takes any number of tokens. Elsewhere only silu · mul
    without biases and without a shared expert is compiled: up to MAX_DECODE_TOKENS tokens, decode
    kernels read the experts in use, 64 pairs at a time. For more tokens, w13 and then w2 of all
    experts are dequantized, exactly, into a temporary tensor, and torch multiplies; each product is
    then rounded to x's dtype before its global scale.
    """
    ids, weights = topk_ids.to(torch.int32), topk_weights.to(torch.float32)
    activation = (FUNCTIONS.index(function), gated, limit, alpha, beta)
    parts = (*w13[:3], w13_bias, w13.rows, *w2[:3], w2_bias, w2.rows)
    more = NOT_SHARED if shared is None else shared.tensors
    return _moe(x.contiguous(), weights, ids, *parts, w13.native, *activation, *more)

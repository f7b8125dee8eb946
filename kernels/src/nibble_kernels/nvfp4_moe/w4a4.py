"""nibble::nvfp4_w4a4_moe: experts with NVFP4 activations and prepared NVFP4 weights, on NVIDIA
GPUs.

Made for SM12x. Other GPUs emulate its products, which is for tests: docs/kernels/blackwell.md.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nibble_kernels.library import operator
from nibble_kernels.nvfp4_linear import check_factor, shape
from nibble_kernels.nvfp4_linear.reference import matmul, round_to_nvfp4
from nibble_kernels.nvfp4_linear.weight import PreparedWeight, stored_weight
from nibble_kernels.nvfp4_moe.grouped import FUNCTIONS, MAX_EXPERTS
from nibble_kernels.nvfp4_moe.reference import activate, rounded_moe
from nibble_kernels.nvfp4_moe.weight import PreparedExperts

__all__ = ["nvfp4_w4a4_moe"]


def _reference(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13_codes: Tensor,
    w13_scales: Tensor,
    w13_global_scales: Tensor,
    w13_input_scale: Tensor,
    w13_bias: Tensor | None,
    w13_rows: int,
    w2_codes: Tensor,
    w2_scales: Tensor,
    w2_global_scales: Tensor,
    w2_input_scale: Tensor,
    w2_bias: Tensor | None,
    w2_rows: int,
    function: int,
    gated: bool,
    limit: float,
    alpha: float,
    beta: float,
    form: int,
) -> Tensor:
    w13 = (w13_codes, w13_scales, w13_global_scales, w13_input_scale, w13_bias, w13_rows)
    w2 = (w2_codes, w2_scales, w2_global_scales, w2_input_scale, w2_bias, w2_rows)

    def product(rows: Tensor, expert: int, is_first: bool) -> Tensor:
        return _expert_product(rows, expert, *(w13 if is_first else w2))

    def activation(h: Tensor) -> Tensor:
        return activate(h, FUNCTIONS[function], gated, False, limit, alpha, beta)

    return rounded_moe(x, topk_weights, topk_ids, len(w13_codes), w2_rows, product, activation)


def _expert_product(
    x: Tensor,
    expert: int,
    codes: Tensor,
    scales: Tensor,
    factors: Tensor,
    input_scale: Tensor,
    bias: Tensor | None,
    rows: int,
) -> Tensor:
    prepared = PreparedWeight(codes[expert], scales[expert], rows, native=True)
    inverse = 1 / input_scale[expert]
    sums = matmul(round_to_nvfp4(x, inverse), *stored_weight(prepared, x.shape[-1]))
    sums = sums * (factors[expert] * (1 / inverse)).repeat_interleave(rows // 2)
    return sums if bias is None else sums + bias[expert].float()


_moe = operator(
    "nvfp4_w4a4_moe(Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor w13_codes, Tensor"
    " w13_scales, Tensor w13_global_scales, Tensor w13_input_scale, Tensor? w13_bias, int w13_rows,"
    " Tensor w2_codes, Tensor w2_scales, Tensor w2_global_scales, Tensor w2_input_scale, Tensor?"
    " w2_bias, int w2_rows, int function, bool gated, float limit, float alpha, float beta, int"
    " form) -> Tensor",
    _reference,
    lambda x, *rest: x.new_empty(x.shape),
)


def nvfp4_w4a4_moe(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13: PreparedExperts,
    w2: PreparedExperts,
    w13_input_scale: Tensor,
    w2_input_scale: Tensor,
    *,
    function: str = "silu",
    gated: bool = True,
    limit: float = math.inf,
    alpha: float = 1.0,
    beta: float = 0.0,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    form: int = 0,
) -> Tensor:
    """The sum of the experts' outputs times topk_weights [T, k], [T, H], for x bfloat16 [T, H] and
    any number of tokens.

    Quantizes x and the intermediate with the input scales of their expert, float32 [E], as
    nvfp4_quant does. topk_ids: [T, k]; a negative or too large id is an expert of another process
    and adds nothing; a token may have an expert twice. w13, w2: prepare_experts with native=True,
    gate's rows before up's. The activation is reference.activate's with gate's rows first. Biases:
    bfloat16 [E, rows]. The same arguments give the same bits; a token's order of additions depends
    on the others' experts and on the GPU's number of multiprocessors. form: tokens of a tile (16,
    32, 64 or 128), for tests. Raises ValueError.
    """
    if not (w13.native and w2.native):
        raise ValueError("the weights must be prepared with native=True")
    experts = len(w13.codes)
    if experts > MAX_EXPERTS:
        raise ValueError(f"expected at most {MAX_EXPERTS} experts; got {experts}")
    if x.ndim != 2 or topk_ids.shape != topk_weights.shape or topk_ids.shape[:1] != x.shape[:1]:
        raise ValueError(
            f"expected x [T, H] and [T, k] weights and ids; got {shape(x)}, {shape(topk_weights)}"
            f" and {shape(topk_ids)}"
        )
    check_factor(w13_input_scale, (experts,), "w13_input_scale")
    check_factor(w2_input_scale, (experts,), "w2_input_scale")
    return _moe(
        x.contiguous(),
        topk_weights.to(torch.float32),
        topk_ids.to(torch.int32),
        *w13[:3],
        w13_input_scale,
        w13_bias,
        w13.rows,
        *w2[:3],
        w2_input_scale,
        w2_bias,
        w2.rows,
        FUNCTIONS.index(function),
        gated,
        limit,
        alpha,
        beta,
        form,
    )

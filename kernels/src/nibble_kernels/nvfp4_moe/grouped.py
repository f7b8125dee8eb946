"""nibble::nvfp4_moe_linear: a layer of NVFP4 experts on SM90, from the choices to the sum."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nibble_kernels.library import operator
from nibble_kernels.nvfp4_linear.reference import matmul
from nibble_kernels.nvfp4_linear.weight import PreparedWeight, stored_weight
from nibble_kernels.nvfp4_moe.reference import activate, rounded_moe
from nibble_kernels.nvfp4_moe.weight import PreparedExperts

MAX_EXPERTS = 1024  # of a layer, with a shared one
# Of activation.cuh.
FUNCTIONS = ("silu", "gelu_tanh", "relu2")
SILU = (0, True, math.inf, 1.0, 0.0)  # silu · mul, the only one of the other kernels


class SharedExpert(NamedTuple):
    """An expert that every token has, as large as a routed one.

    weights: bfloat16 [T, 1], what its output is multiplied with; w13, w2: prepared as one expert.
    """

    weights: Tensor
    w13: PreparedExperts
    w2: PreparedExperts

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Arguments of the operators."""
        return (self.weights, *self.w13[:3], *self.w2[:3])


SHARED_SCHEMA = (
    "Tensor? shared_weights, Tensor? shared_w13_codes, Tensor? shared_w13_scales,"
    " Tensor? shared_w13_global_scales, Tensor? shared_w2_codes, Tensor? shared_w2_scales,"
    " Tensor? shared_w2_global_scales"
)
NOT_SHARED = (None,) * len(SHARED_SCHEMA.split(","))


def _reference(
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
    function: int,
    gated: bool,
    limit: float,
    alpha: float,
    beta: float,
    shared_weights: Tensor | None,
    *rest: Tensor,
) -> Tensor:
    routed = len(w13_codes)
    w13 = (w13_codes, w13_scales, w13_global_scales, w13_bias, w13_rows)
    w2 = (w2_codes, w2_scales, w2_global_scales, w2_bias, w2_rows)
    experts = routed
    if shared_weights is not None:
        experts += 1
        others = topk_ids.masked_fill(topk_ids >= routed, -1)
        topk_ids = torch.nn.functional.pad(others, (0, 1), value=routed)
        topk_weights = torch.cat((topk_weights, shared_weights.reshape(-1, 1).float()), dim=1)

    def product(rows: Tensor, expert: int, is_first: bool) -> Tensor:
        if expert == routed:
            codes, scales, factors = rest[:3] if is_first else rest[3:6]
            return _expert_product(
                rows, 0, codes, scales, factors, None, w13_rows if is_first else w2_rows
            )
        return _expert_product(rows, expert, *(w13 if is_first else w2))

    def activation(h: Tensor) -> Tensor:
        return activate(h, FUNCTIONS[function], gated, False, limit, alpha, beta)

    return rounded_moe(x, topk_weights, topk_ids, experts, w2_rows, product, activation)


def _expert_product(
    x: Tensor,
    expert: int,
    codes: Tensor,
    scales: Tensor,
    factors: Tensor,
    bias: Tensor | None,
    rows: int,
) -> Tensor:
    prepared = PreparedWeight(codes[expert], scales[expert], rows, native=False)
    sums = matmul(x.float(), *stored_weight(prepared, x.shape[-1]))
    sums = sums * factors[expert].repeat_interleave(rows // 2)
    return sums if bias is None else sums + bias[expert].float()


moe_linear_operator = operator(
    "nvfp4_moe_linear(Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor w13_codes, Tensor"
    " w13_scales, Tensor w13_global_scales, Tensor? w13_bias, int w13_rows, Tensor w2_codes, Tensor"
    " w2_scales, Tensor w2_global_scales, Tensor? w2_bias, int w2_rows, int function, bool gated,"
    f" float limit, float alpha, float beta, {SHARED_SCHEMA}, int form) -> Tensor",
    _reference,
    lambda x, *rest: torch.empty_like(x),
)


def nvfp4_moe_linear(
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
    form: int = 0,
) -> Tensor:
    """The sum of the experts' outputs times topk_weights [T, k], [T, H], for x bfloat16 [T, H] and
    any number of tokens. Compiled for SM90 alone.

    topk_ids: int32 [T, k], different ones for a token; a negative or too large id is an expert of
    another process and adds nothing. The activation is reference.activate's with gate's rows first.
    Biases: bfloat16 [E, rows], not beside a shared expert. shared: one more expert of each token,
    added last. A token's bits depend on the number of tokens through its form alone. form: tokens
    of a tile (8, 16, 32, 64 or 128), or -4 or -8 for the kernel of few pairs with units of 4 or 8
    groups, for tests and measurements.
    """
    return moe_linear_operator(
        x,
        topk_weights,
        topk_ids,
        *w13[:3],
        w13_bias,
        w13.rows,
        *w2[:3],
        w2_bias,
        w2.rows,
        FUNCTIONS.index(function),
        gated,
        limit,
        alpha,
        beta,
        *(NOT_SHARED if shared is None else shared.tensors),
        form,
    )

"""nibble::nvfp4_moe: experts with NVFP4 weights, and unquantized or quantized activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nibble_kernels.library import operator
from nibble_kernels.nvfp4_linear import check_factor, check_weight, shape
from nibble_kernels.nvfp4_moe import reference

__all__ = ["nvfp4_moe"]

MOE_ARGUMENTS = (
    "Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor w13, Tensor w13_scale, Tensor"
    " w13_global_scale, Tensor w2, Tensor w2_scale, Tensor w2_global_scale, Tensor?"
    " w13_input_scale, Tensor? w2_input_scale, bool weight_on_input, str function, bool gated, bool"
    " interleaved, float limit, float alpha, float beta"
)


def fake_moe(x: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape)


_nvfp4_moe = operator(f"nvfp4_moe({MOE_ARGUMENTS}) -> Tensor", reference.nvfp4_moe, fake_moe)


class Activation(NamedTuple):
    """The arguments of reference.activate."""

    function: str
    gated: bool = True
    interleaved: bool = False
    limit: float = math.inf
    alpha: float = 1.0
    beta: float = 0.0


# By the values of vLLM's MoEActivation (vllm 0.32 fused_moe/activation.py:20); the formulas begin
# at line 352 there.
ACTIVATIONS = {
    "silu": Activation("silu"),
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "swigluoai": Activation("silu", interleaved=True, limit=7.0, alpha=1.702, beta=1.0),
    "swigluoai_uninterleave": Activation("silu"),
    "swiglustep": Activation("swiglustep", limit=7.0),
    "silu_no_mul": Activation("silu", gated=False),
    "gelu_no_mul": Activation("gelu", gated=False),
    "gelu_tanh_no_mul": Activation("gelu_tanh", gated=False),
    "relu2_no_mul": Activation("relu2", gated=False),
}


def activation_of(
    name: str, limit: float | None, alpha: float | None, beta: float | None
) -> Activation:
    """The activation `name` with the model's swiglu parameters.

    Raises ValueError for a name that is not in ACTIVATIONS, or without a required limit.
    """
    if name not in ACTIVATIONS:
        raise ValueError(
            f"experts with the activation {name!r} are not supported; expected one of"
            f" {', '.join(ACTIVATIONS)}"
        )
    activation = ACTIVATIONS[name]
    if name == "swigluoai_uninterleave":
        if limit is None:
            raise ValueError("the activation swigluoai_uninterleave needs swiglu_limit")
        return activation._replace(
            limit=limit, alpha=1.0 if alpha is None else alpha, beta=beta or 0.0
        )
    if name == "silu" and limit is not None:
        return activation._replace(limit=limit)
    return activation


def nvfp4_moe(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w13_global_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w2_global_scale: Tensor,
    activation: str,
    *,
    w13_input_scale: Tensor | None = None,
    w2_input_scale: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    swiglu_limit: float | None = None,
    swiglu_alpha: float | None = None,
    swiglu_beta: float | None = None,
) -> Tensor:
    """The sum of the experts' outputs times topk_weights, [T, H] in x's dtype (see reference.py).

    x: [T, H]; topk_weights: [T, k]; topk_ids: int32 or int64 [T, k], indices of experts; negative
    ids are skipped.
    w13: codes uint8 [E, 2I, H/2], scales float8_e4m3fn [E, 2I, H/16], gate's rows first, and global
    scales float32 [E, 2] of gate and up; without gate, I rows and [E, 1].
    w2: codes [E, H, I/2], scales [E, H, I/16], global scales [E].
    activation: a value of vLLM's MoEActivation. "silu" uses swiglu_limit, "swigluoai_uninterleave"
    all three swiglu parameters.
    w13_input_scale, w2_input_scale: float32 [E], both for W4A4 or none for W4A16.
    apply_router_weight_on_input: multiply x by the weights instead of the outputs.
    Raises ValueError if types or shapes do not fit.
    """
    chosen = activation_of(activation, swiglu_limit, swiglu_alpha, swiglu_beta)
    experts, rows = w13.shape[:2]
    check_weight(x.shape[-1], w13, w13_scale, "w13")
    check_weight(rows // (2 if chosen.gated else 1), w2, w2_scale, "w2")
    if w2.shape[:2] != (experts, x.shape[-1]):
        raise ValueError(
            f"w2 must be [{experts}, {x.shape[-1]}, ...], as w13 and x are; got {shape(w2)}"
        )
    return call_moe(
        _nvfp4_moe,
        x,
        topk_weights,
        topk_ids,
        (w13, w13_scale, w13_global_scale),
        (w2, w2_scale, w2_global_scale),
        chosen,
        w13_input_scale,
        w2_input_scale,
        apply_router_weight_on_input,
    )


def call_moe(
    operator: Callable[..., Tensor],
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13: tuple[Tensor, Tensor, Tensor],
    w2: tuple[Tensor, Tensor, Tensor],
    chosen: Activation,
    w13_input_scale: Tensor | None,
    w2_input_scale: Tensor | None,
    apply_router_weight_on_input: bool,
) -> Tensor:
    """One of the operators with MOE_ARGUMENTS, after checks of what does not depend on how weights
    are stored. w13 and w2 are codes, scales and global scales.
    """
    experts = len(w13[0])
    if x.ndim != 2 or topk_ids.shape != topk_weights.shape or topk_ids.shape[:1] != x.shape[:1]:
        raise ValueError(
            f"expected x [T, H] and [T, k] weights and ids; got {shape(x)}, {shape(topk_weights)}"
            f" and {shape(topk_ids)}"
        )
    check_factor(w13[2], (experts, 2 if chosen.gated else 1), "w13_global_scale")
    check_factor(w2[2], (experts,), "w2_global_scale")
    if (w13_input_scale is None) != (w2_input_scale is None):
        raise ValueError("input scales must be given for both w13 and w2, or for neither")
    if w13_input_scale is not None and w2_input_scale is not None:
        check_factor(w13_input_scale, (experts,), "w13_input_scale")
        check_factor(w2_input_scale, (experts,), "w2_input_scale")
    return operator(
        x,
        topk_weights.to(torch.float32),
        topk_ids.to(torch.int64),
        *w13,
        *w2,
        w13_input_scale,
        w2_input_scale,
        apply_router_weight_on_input,
        *chosen,
    )

"""nibble::nvfp4_norm_linear and nvfp4_norm_mlp: products of a norm's result with prepared NVFP4
weights, on NVIDIA GPUs. On SM90 the norm, and silu · mul, write what the next product multiplies in
that product's order (nvfp4_linear/warpgroup_form.h).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from nibble_kernels.library import operator
from nibble_kernels.nvfp4_linear.gpu import weight_linear
from nibble_kernels.nvfp4_linear.weight import PreparedWeight
from nibble_kernels.rms_norm import rms_norm

__all__ = ["LinearLayer", "Norm", "nvfp4_norm_linear", "nvfp4_norm_mlp"]


class Norm(NamedTuple):
    """RMSNorm: weight [K]."""

    weight: Tensor
    epsilon: float


class LinearLayer(NamedTuple):
    """A prepared weight [N, K], column_scale float32 [N] and bias [N]."""

    weight: PreparedWeight
    global_scale: float
    column_scale: Tensor | None = None
    bias: Tensor | None = None


def _norm_linear(x: Tensor, norm_weight: Tensor, epsilon: float, *rest: Any) -> Tensor:
    *product, batch_invariant = rest
    normal = rms_norm(x, norm_weight, epsilon)
    return weight_linear(normal, *product, None, False, batch_invariant)


def _norm_mlp(x: Tensor, norm_weight: Tensor, epsilon: float, native: bool, *rest: Any) -> Tensor:
    *layers, batch_invariant = rest

    def product(x: Tensor, layer: list[Any], residual: Tensor | None, silu_mul: bool) -> Tensor:
        codes, scales, outputs, *others = layer
        weight = (codes, scales, outputs, native)
        return weight_linear(x, *weight, *others, residual, silu_mul, batch_invariant)

    between = product(rms_norm(x, norm_weight, epsilon), layers[:6], None, True)
    return product(between, layers[6:], x, False)


_linear = operator(
    "nvfp4_norm_linear(Tensor x, Tensor norm_weight, float epsilon, Tensor codes, Tensor scales,"
    " int outputs, bool native, float global_scale, Tensor? column_scale, Tensor? bias, bool"
    " batch_invariant) -> Tensor",
    _norm_linear,
    lambda x, norm_weight, epsilon, codes, scales, outputs, *rest: x.new_empty(
        (*x.shape[:-1], outputs)
    ),
)
_mlp = operator(
    "nvfp4_norm_mlp(Tensor x, Tensor norm_weight, float epsilon, bool native, Tensor gate_up_codes,"
    " Tensor gate_up_scales, int gate_up_outputs, float gate_up_global_scale, Tensor?"
    " gate_up_column_scale, Tensor? gate_up_bias, Tensor down_codes, Tensor down_scales, int"
    " down_outputs, float down_global_scale, Tensor? down_column_scale, Tensor? down_bias, bool"
    " batch_invariant) -> Tensor",
    _norm_mlp,
    lambda x, *rest: x.new_empty(x.shape),
)


def nvfp4_norm_linear(
    x: Tensor, norm: Norm, layer: LinearLayer, *, batch_invariant: bool = False
) -> Tensor:
    """nvfp4_weight_linear of rms_norm(x): x [..., K], bfloat16 or float16, to [..., N].

    On SM90 a row's result depends on the number of rows through its bucket (up to 4, 8, 16, 32, 64,
    128), and above 128 through the number; with batch_invariant it does not.
    """
    return _linear(x, *norm, *_of(layer), batch_invariant)


def nvfp4_norm_mlp(
    x: Tensor,
    norm: Norm,
    gate_up: LinearLayer,
    down: LinearLayer,
    *,
    batch_invariant: bool = False,
) -> Tensor:
    """x plus down(silu(gate) · up) of rms_norm(x), [..., K]. Gate and up are the halves of
    gate_up's outputs, and what lies between the products is rounded to x's dtype. Of the number of
    rows, nvfp4_norm_linear's words hold.
    """
    native = gate_up.weight.native
    if down.weight.native != native:
        raise ValueError("gate_up and down must be prepared for the same dtype of activations")
    parts = [(*w[:3], scale, column, bias) for w, scale, column, bias in (gate_up, down)]
    return _mlp(x, *norm, native, *parts[0], *parts[1], batch_invariant)


def _of(layer: LinearLayer) -> tuple[object, ...]:
    return (*layer.weight, layer.global_scale, layer.column_scale, layer.bias)

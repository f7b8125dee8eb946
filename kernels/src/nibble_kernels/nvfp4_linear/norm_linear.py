"""nibble::nvfp4_norm_linear and nvfp4_norm_mlp: products of a norm's result with prepared NVFP4
weights, on NVIDIA GPUs. On SM90 the norm, and silu · mul, write what the next product multiplies in
that product's order (nvfp4_linear/warpgroup_form.h).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from nibble_kernels.library import operator
from nibble_kernels.nvfp4_linear.gpu import nvfp4_weight_linear
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


def _norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    epsilon: float,
    codes: Tensor,
    scales: Tensor,
    outputs: int,
    native: bool,
    global_scale: float,
    column_scale: Tensor | None,
    bias: Tensor | None,
    batch_invariant: bool,
) -> Tensor:
    return nvfp4_weight_linear(
        rms_norm(x, norm_weight, epsilon),
        PreparedWeight(codes, scales, outputs, native),
        global_scale,
        column_scale=column_scale,
        bias=bias,
        batch_invariant=batch_invariant,
    )


def _norm_mlp(
    x: Tensor,
    norm_weight: Tensor,
    epsilon: float,
    native: bool,
    gate_up_codes: Tensor,
    gate_up_scales: Tensor,
    gate_up_outputs: int,
    gate_up_global_scale: float,
    gate_up_column_scale: Tensor | None,
    gate_up_bias: Tensor | None,
    down_codes: Tensor,
    down_scales: Tensor,
    down_outputs: int,
    down_global_scale: float,
    down_column_scale: Tensor | None,
    down_bias: Tensor | None,
    batch_invariant: bool,
) -> Tensor:
    between = nvfp4_weight_linear(
        rms_norm(x, norm_weight, epsilon),
        PreparedWeight(gate_up_codes, gate_up_scales, gate_up_outputs, native),
        gate_up_global_scale,
        column_scale=gate_up_column_scale,
        bias=gate_up_bias,
        silu_mul=True,
        batch_invariant=batch_invariant,
    )
    return nvfp4_weight_linear(
        between,
        PreparedWeight(down_codes, down_scales, down_outputs, native),
        down_global_scale,
        column_scale=down_column_scale,
        bias=down_bias,
        residual=x,
        batch_invariant=batch_invariant,
    )


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

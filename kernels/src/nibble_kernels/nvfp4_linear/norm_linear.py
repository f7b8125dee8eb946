"""nibble::nvfp4_norm_linear, nvfp4_norm_mlp and nvfp4_between_attentions: products of a norm's
result with prepared NVFP4 weights, on NVIDIA GPUs. On SM90 the norm, and silu · mul, write what the
next product multiplies in that product's order (nvfp4_linear/warpgroup_form.h).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from nibble_kernels.library import operator
from nibble_kernels.nvfp4_linear.gpu import weight_linear
from nibble_kernels.nvfp4_linear.weight import PreparedWeight
from nibble_kernels.rms_norm import rms_norm

__all__ = [
    "LinearLayer",
    "Norm",
    "nvfp4_between_attentions",
    "nvfp4_norm_linear",
    "nvfp4_norm_mlp",
]


_QKV_OUTPUTS = 25  # the place among nvfp4_between_attentions' arguments after the stream


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


def _between_attentions(
    attended: Tensor, stream: Tensor, native: bool, *rest: Any
) -> tuple[Tensor, Tensor]:
    *layers, batch_invariant = rest
    (codes, scales, outputs, *others), mlp = layers[:6], layers[6:20]
    o = (codes, scales, outputs, native, *others)
    stream = weight_linear(attended, *o, stream, False, batch_invariant)
    stream = _norm_mlp(stream, *mlp[:2], native, *mlp[2:], batch_invariant)
    norm, (codes, scales, outputs, *others) = layers[20:22], layers[22:]
    qkv = (codes, scales, outputs, native, *others)
    return stream, _norm_linear(stream, *norm, *qkv, batch_invariant)


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
_between = operator(
    "nvfp4_between_attentions(Tensor attended, Tensor stream, bool native, Tensor o_codes, Tensor"
    " o_scales, int o_outputs, float o_global_scale, Tensor? o_column_scale, Tensor? o_bias, Tensor"
    " norm_weight, float epsilon, Tensor gate_up_codes, Tensor gate_up_scales, int gate_up_outputs,"
    " float gate_up_global_scale, Tensor? gate_up_column_scale, Tensor? gate_up_bias, Tensor"
    " down_codes, Tensor down_scales, int down_outputs, float down_global_scale, Tensor?"
    " down_column_scale, Tensor? down_bias, Tensor next_norm_weight, float next_epsilon, Tensor"
    " qkv_codes, Tensor qkv_scales, int qkv_outputs, float qkv_global_scale, Tensor?"
    " qkv_column_scale, Tensor? qkv_bias, bool batch_invariant) -> (Tensor, Tensor)",
    _between_attentions,
    lambda attended, stream, *rest: (
        stream.new_empty(stream.shape),
        stream.new_empty((*stream.shape[:-1], rest[_QKV_OUTPUTS])),
    ),
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
    native, (of_gate_up, of_down) = _native_and_rest(gate_up, down)
    return _mlp(x, *norm, native, *of_gate_up, *of_down, batch_invariant)


def nvfp4_between_attentions(
    attended: Tensor,
    stream: Tensor,
    o: LinearLayer,
    norm: Norm,
    gate_up: LinearLayer,
    down: LinearLayer,
    next_norm: Norm,
    qkv: LinearLayer,
    *,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """What follows a layer's attention, up to the next layer's: the stream [..., K] after this
    layer, and queries, keys and values of the next one.

    attended is attention's result and o's input. The stream becomes stream + o(attended), then
    nvfp4_norm_mlp of that, and qkv is nvfp4_norm_linear's. Of the number of rows,
    nvfp4_norm_linear's words hold. Up to 8 rows, and up to 64 on SM90 where hidden and intermediate
    sizes are multiples of 128, norms of bfloat16 have no kernels: a product's sums get the factor
    1 / RMS, and results differ in their rounding. In float16 values without it could overflow.
    """
    native, parts = _native_and_rest(o, gate_up, down, qkv)
    of_o, of_gate_up, of_down, of_qkv = parts
    between = (*of_o, *norm, *of_gate_up, *of_down, *next_norm, *of_qkv)
    return _between(attended, stream, native, *between, batch_invariant)


def _native_and_rest(*layers: LinearLayer) -> tuple[bool, list[tuple[object, ...]]]:
    native = {layer.weight.native for layer in layers}
    if len(native) != 1:
        raise ValueError("the layers must be prepared for the same dtype of activations")
    return native.pop(), [(*w[:3], scale, column, bias) for w, scale, column, bias in layers]


def _of(layer: LinearLayer) -> tuple[object, ...]:
    return (*layer.weight, layer.global_scale, layer.column_scale, layer.bias)

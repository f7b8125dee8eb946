"""NVFP4 weight quantization with the same bits as ModelOpt 0.47, on every device.

nibble does not use ModelOpt, because it needs the whole model in memory, depends on pulp, omegaconf
and scipy, and its four-over-six needs Triton and a GPU (modelopt 0.47
torch/quantization/tensor_quant.py, StaticBlockwiseFP4FakeQuantFunction). compressed-tensors'
quantizer, which vLLM depends on, rounds differently: it multiplies by a rounded reciprocal of the
scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nibble_kernels.library import operator
from nibble_kernels.scale_layout import BLOCK
from nibble_kernels.weight_quant import reference
from nibble_kernels.weight_quant.reference import E2M1_MAX, E4M3_MAX, E4M3_MAX_FOUR_OVER_SIX

__all__ = ["Nvfp4Weight", "dequantize", "global_scale_of", "largest_magnitude", "quantize"]

_largest_magnitude = operator(
    "largest_magnitude(Tensor x) -> Tensor",
    reference.largest_magnitude,
    lambda x: x.new_empty((), dtype=torch.float32),
)
_quantize_weight = operator(
    "nvfp4_quantize_weight(Tensor weight, Tensor amax, Tensor global_scale, bool four_over_six) ->"
    " (Tensor, Tensor)",
    reference.quantize_weight,
    lambda weight, amax, global_scale, four_over_six: (
        weight.new_empty((weight.shape[0], weight.shape[1] // 2), dtype=torch.uint8),
        weight.new_empty((weight.shape[0], weight.shape[1] // BLOCK), dtype=torch.float8_e4m3fn),
    ),
)


class Nvfp4Weight(NamedTuple):
    """A weight [N, K] in NVFP4. An element is e2m1(code) * scale * global_scale.

    packed: uint8 [N, K/2], the even column in the low nibble; scales: float8_e4m3fn [N, K/16];
    global_scale: float32 [].
    """

    packed: Tensor
    scales: Tensor
    global_scale: Tensor


def largest_magnitude(x: Tensor) -> Tensor:
    """The largest magnitude in x (float32, bfloat16 or float16), float32 []. NaN where x holds one;
    0 for an empty tensor.
    """
    return _largest_magnitude(x)


def quantize(
    weight: Tensor, amax: Tensor | None = None, *, four_over_six: bool = False
) -> Nvfp4Weight:
    """Quantize `weight` [N, K] of any floating-point dtype, with K % 16 == 0, to NVFP4.

    amax: float32 [], the largest magnitude for the global scale: that of all weights that share the
    scale; default: the weight's. four_over_six: put the largest element of a block at 4 instead of
    6 if the squared error is smaller. Raises ValueError for another shape and for elements that are
    not finite.
    """
    if weight.dim() != 2 or weight.shape[1] % BLOCK:
        raise ValueError(
            f"weight has shape {list(weight.shape)}; expected [N, K] with K % {BLOCK} == 0"
        )
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        weight = weight.float()
    weight_amax = _largest_magnitude(weight)
    if not weight_amax.isfinite():
        raise ValueError("weight holds values that are not finite")
    shared = (weight_amax if amax is None else amax.to(weight.device)).float().reshape(())
    global_scale = global_scale_of(shared, four_over_six)
    if not weight.numel():
        shape = (weight.shape[0], weight.shape[1] // 2)
        empty = weight.new_empty(shape, dtype=torch.uint8)
        scales = weight.new_empty((shape[0], weight.shape[1] // BLOCK), dtype=torch.float8_e4m3fn)
        return Nvfp4Weight(empty, scales, global_scale)
    packed, scales = _quantize_weight(weight, shared, global_scale, four_over_six)
    return Nvfp4Weight(packed, scales, global_scale)


def global_scale_of(amax: Tensor, four_over_six: bool) -> Tensor:
    """The global scale, float32 [], of weights whose largest magnitude is `amax`, float32 []."""
    largest = E4M3_MAX_FOUR_OVER_SIX if four_over_six else E4M3_MAX
    # ModelOpt divides 0 by 0 for a weight of zeros, which any scale represents.
    return torch.where(amax > 0, amax / (E2M1_MAX * largest), 1.0)


def dequantize(weight: Nvfp4Weight) -> Tensor:
    """The elements, float32 [N, K], as e2m1 * (scale * global_scale), with ModelOpt's rounding."""
    return reference.values(*weight)

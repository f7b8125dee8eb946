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

from nibble_kernels.conversions import e2m1_decode, e2m1_encode, e4m3_decode, e4m3_encode
from nibble_kernels.scale_layout import BLOCK

__all__ = ["Nvfp4Weight", "dequantize", "quantize"]

E2M1_MAX = 6.0
E4M3_MAX = 448.0
# If a block's largest element becomes 4, its scale is 1.5 times as large: 256 becomes 384. Both are
# E4M3 values.
E4M3_MAX_FOUR_OVER_SIX = 256.0
MIN_SCALE = 2.0**-9  # the smallest E4M3 value, so that scales are never 0
# Elements of one step. A CPU's copies then fit its caches: 3 to 4 times as fast as 1 << 24. A GPU's
# take some hundred MB.
ELEMENTS_AT_ONCE = 1 << 18
GPU_ELEMENTS_AT_ONCE = 1 << 24


class Nvfp4Weight(NamedTuple):
    """A weight [N, K] in NVFP4. An element is e2m1(code) * scale * global_scale.

    packed: uint8 [N, K/2], the even column in the low nibble; scales: float8_e4m3fn [N, K/16];
    global_scale: float32 [].
    """

    packed: Tensor
    scales: Tensor
    global_scale: Tensor


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
    weight_amax = (
        weight.abs().amax().float() if weight.numel() else weight.new_zeros((), dtype=torch.float32)
    )
    if not weight_amax.isfinite():
        raise ValueError("weight holds values that are not finite")
    amax = (weight_amax if amax is None else amax).float().reshape(())
    largest = E4M3_MAX_FOUR_OVER_SIX if four_over_six else E4M3_MAX
    # ModelOpt divides 0 by 0 for a weight of zeros, which any scale represents.
    global_scale = torch.where(amax > 0, amax / (E2M1_MAX * largest), 1.0)
    elements = ELEMENTS_AT_ONCE if weight.device.type == "cpu" else GPU_ELEMENTS_AT_ONCE
    rows = max(1, elements // max(1, weight.shape[1]))
    round_rows = _four_over_six if four_over_six else _six
    parts = [round_rows(part.float(), amax, global_scale) for part in weight.split(rows)]
    return Nvfp4Weight(
        torch.cat([p for p, _ in parts]), torch.cat([s for _, s in parts]), global_scale
    )


def dequantize(weight: Nvfp4Weight) -> Tensor:
    """The elements, float32 [N, K], as e2m1 * (scale * global_scale), with ModelOpt's rounding."""
    block_scale = e4m3_decode(weight.scales) * weight.global_scale.float()
    return (e2m1_decode(weight.packed).unflatten(-1, (-1, BLOCK)) * block_scale[..., None]).flatten(
        -2
    )


def _six(weight: Tensor, _amax: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Packed codes and scales of float32 rows, with each block's largest element at 6."""
    block_amax = weight.unflatten(-1, (-1, BLOCK)).abs().amax(-1)
    scales = _scales(block_amax / (E2M1_MAX * global_scale))
    return _codes(weight, scales, global_scale), scales


def _four_over_six(weight: Tensor, amax: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Packed codes and scales of float32 rows, with each block's largest element at 6, or at 4 if
    the error is smaller.
    """
    block_amax = weight.unflatten(-1, (-1, BLOCK)).abs().amax(-1)
    candidates = []
    for factor in (1.0, 1.5):
        # ModelOpt's order of operations for calibrated blocks, which differs from that in _six.
        scales = _scales(
            block_amax
            * factor
            / E2M1_MAX
            * E4M3_MAX_FOUR_OVER_SIX
            / (amax / E2M1_MAX).clamp_min(1e-38)
        )
        packed = _codes(weight, scales, global_scale)
        difference = weight - dequantize(Nvfp4Weight(packed, scales, global_scale))
        error = difference.square().unflatten(-1, (-1, BLOCK)).sum(-1)
        candidates.append((packed.unflatten(-1, (-1, BLOCK // 2)), scales, error))
    (six, six_scales, six_error), (four, four_scales, four_error) = candidates
    better = four_error < six_error
    packed = torch.where(better[..., None], four, six).flatten(-2)
    return packed, torch.where(
        better, four_scales.view(torch.uint8), six_scales.view(torch.uint8)
    ).view(torch.float8_e4m3fn)


def _scales(wanted: Tensor) -> Tensor:
    return e4m3_encode(torch.where(wanted == 0, 1.0, wanted).clamp(MIN_SCALE, E4M3_MAX))


def _codes(weight: Tensor, scales: Tensor, global_scale: Tensor) -> Tensor:
    scaled = weight.unflatten(-1, (-1, BLOCK)) / (e4m3_decode(scales) * global_scale)[..., None]
    # + 0.0 makes -0 to 0, as ModelOpt does.
    return e2m1_encode(scaled.flatten(-2) + 0.0)

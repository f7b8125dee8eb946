"""nibble::nvfp4_quantize_weight and nibble::largest_magnitude in plain torch: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from nibble_kernels.conversions import e2m1_decode, e2m1_encode, e4m3_decode, e4m3_encode
from nibble_kernels.scale_layout import BLOCK

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


def largest_magnitude(x: Tensor) -> Tensor:
    """float32 []; NaN where x holds one."""
    return x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)


def quantize_weight(
    weight: Tensor, amax: Tensor, global_scale: Tensor, four_over_six: bool
) -> tuple[Tensor, Tensor]:
    """Packed codes and scales of a weight [N, K]."""
    elements = ELEMENTS_AT_ONCE if weight.device.type == "cpu" else GPU_ELEMENTS_AT_ONCE
    rows = max(1, elements // max(1, weight.shape[1]))
    round_rows = _four_over_six if four_over_six else _six
    parts = [round_rows(part.float(), amax, global_scale) for part in weight.split(rows)]
    return torch.cat([packed for packed, _ in parts]), torch.cat([scales for _, scales in parts])


def values(packed: Tensor, scales: Tensor, global_scale: Tensor) -> Tensor:
    """The elements, float32 [N, K], as e2m1 * (scale * global_scale), with ModelOpt's rounding."""
    block_scale = e4m3_decode(scales) * global_scale.float()
    return (e2m1_decode(packed).unflatten(-1, (-1, BLOCK)) * block_scale[..., None]).flatten(-2)


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
        error = _squares(weight - values(packed, scales, global_scale))
        candidates.append((packed.unflatten(-1, (-1, BLOCK // 2)), scales, error))
    (six, six_scales, six_error), (four, four_scales, four_error) = candidates
    better = four_error < six_error
    packed = torch.where(better[..., None], four, six).flatten(-2)
    return packed, torch.where(
        better, four_scales.view(torch.uint8), six_scales.view(torch.uint8)
    ).view(torch.float8_e4m3fn)


def _squares(difference: Tensor) -> Tensor:
    """The sum of squares of each block: eight sums of two, one after another. The order decides
    where the two errors of a block are nearly equal, and torch's differs by device.
    """
    low, high = difference.square().unflatten(-1, (-1, 2, BLOCK // 2)).unbind(-2)
    first, *others = (low + high).unbind(-1)
    for other in others:
        first = first + other
    return first


def _scales(wanted: Tensor) -> Tensor:
    return e4m3_encode(torch.where(wanted == 0, 1.0, wanted).clamp(MIN_SCALE, E4M3_MAX))


def _codes(weight: Tensor, scales: Tensor, global_scale: Tensor) -> Tensor:
    scaled = weight.unflatten(-1, (-1, BLOCK)) / (e4m3_decode(scales) * global_scale)[..., None]
    # + 0.0 makes -0 to 0, as ModelOpt does.
    return e2m1_encode(scaled.flatten(-2) + 0.0)

"""Merges the global scales of layers that are fused from several quantized tensors (q/k/v, gate/up)
exactly, in plain torch.

A checkpoint has a global scale g_i for each tensor i: weight = e2m1 * e4m3(block scale) * g_i. A
fused layer has one, G. vLLM 0.32 uses max(g_i), min(g_i) or gate's without a change of the block
scales, which multiplies tensor i by G/g_i. This module keeps the weights: it multiplies the block
scales by g_i/G if every result is an E4M3 value, else it returns a float32 factor for each output
column, to apply after the matrix product.

Marlin stores block scales as unsigned E5M3 and drops values below 2^-6 after it has shifted the
layer up to 448 (vllm 0.32 marlin_utils_fp4.py:117). For Marlin, each row is shifted separately,
which is exact too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nibble_kernels.conversions.reference import E4M3_MAX, e4m3_encode

MARLIN_SMALLEST = 2.0**-6
ROWS_AT_A_TIME = 4096  # of codes, to limit the memory of temporary tensors


class Merged(NamedTuple):
    """Block scales, float8_e4m3fn [N, K/16], the global scale, float32 [], and factors of the
    output columns, float32 [N], or None.
    """

    scales: Tensor
    global_scale: Tensor
    column_scale: Tensor | None


class ScaleError(ValueError):
    """Scales that have no exact representation, or that no loader wrote."""


def merge_scales(
    scales: Tensor, global_scales: Tensor, widths: Sequence[int], marlin_codes: Tensor | None = None
) -> Merged:
    """Merge the global scales of tensors with `widths` rows each into one.

    scales: block scales [N, K/16]; global_scales: multipliers, float32 [len(widths)].
    marlin_codes: the weights' codes, uint8 [N, K/2], if Marlin multiplies; then no block scale in
    use is one that Marlin drops.
    The result dequantizes to the same values, e2m1 * scales * global_scale * column_scale, except
    for the float32 rounding of a column factor (2^-24). Without a change it has `scales` itself.
    Raises ScaleError for scales that are not finite and positive, and for rows whose block scales
    have a larger range than Marlin's.
    """
    _check_global_scales(global_scales)
    given = [float(value) for value in global_scales.float().tolist()]
    if len(set(given)) == 1:
        merged, common, column = scales, given[0], None
    else:
        merged, common, column = _merge_unequal(scales, given, list(widths))
    if marlin_codes is not None:
        merged, column = _fit_marlin(merged, column, marlin_codes)
    return Merged(merged, torch.tensor(common, dtype=torch.float32, device=scales.device), column)


def _merge_unequal(
    scales: Tensor, given: Sequence[float], widths: list[int]
) -> tuple[Tensor, float, Tensor | None]:
    """(block scales, global scale, column factors) for different global scales `given`."""
    parts = list(scales.split(widths))
    common, folded = _best_common(parts, given)
    factors = [
        1.0 if part is not None else value / common
        for part, value in zip(folded, given, strict=True)
    ]
    merged = torch.cat(
        [new if new is not None else old for new, old in zip(folded, parts, strict=True)]
    )
    if all(factor == 1.0 for factor in factors):
        return merged, common, None
    rows = torch.tensor(widths, device=scales.device)
    column = torch.tensor(factors, dtype=torch.float32, device=scales.device).repeat_interleave(
        rows
    )
    return merged, common, column


def fold(scales: Tensor, ratio_of: tuple[float, float]) -> Tensor | None:
    """Block scales for the global scale ratio_of[1] with the values that `scales` have with
    ratio_of[0]; None if a result is not an E4M3 value.
    """
    before, common = ratio_of
    if before == common:
        return scales
    folded, fits = _folded_codes(before, common)
    codes = scales.view(torch.uint8)
    used = torch.bincount(codes.flatten(), minlength=256).cpu() > 0
    if not bool(fits[used].all()):
        return None
    return folded.to(scales.device)[codes.long()].view(torch.float8_e4m3fn)


@functools.lru_cache(maxsize=64)
def _folded_codes(before: float, common: float) -> tuple[Tensor, Tensor]:
    """For each of the 256 codes: that of the same value with the other global scale, and whether
    there is one.
    """
    codes = torch.arange(256).to(torch.uint8)
    # E4M3 has 4 significant bits and float32 24, so products are exact in float64.
    wanted = codes.view(torch.float8_e4m3fn).double() * before
    folded = e4m3_encode((wanted / common).float())
    return folded, folded.view(torch.float8_e4m3fn).double() * common == wanted


def _best_common(
    parts: Sequence[Tensor], given: Sequence[float]
) -> tuple[float, list[Tensor | None]]:
    """The global scale with which most rows fold, or the largest of several, and the folded block
    scales.
    """
    best: tuple[int, float, list[Tensor | None]] | None = None
    for common in sorted(set(given), reverse=True):
        folded = [fold(part, (value, common)) for part, value in zip(parts, given, strict=True)]
        rows = sum(part.shape[0] for part in folded if part is not None)
        if best is None or rows > best[0]:
            best = (rows, common, folded)
    assert best is not None
    return best[1], best[2]


def _fit_marlin(
    scales: Tensor, column: Tensor | None, codes: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Shift rows so that Marlin drops no block scale, and put the inverse into column factors."""
    lifted, shift = _lift(scales, codes, "rows", "--linear-backend humming")
    if shift is None:
        return lifted, column
    factor = torch.ldexp(torch.ones_like(shift), -shift)
    return lifted, factor if column is None else column * factor


def _lift(scales: Tensor, codes: Tensor, items: str, remedy: str) -> tuple[Tensor, Tensor | None]:
    """Block scales [R, …, K/16], with each of R shifted up to 448 by a power of two, and the
    exponents, float32 [R].

    If Marlin drops nothing: unshifted scales and None. items: "rows" or "experts", for errors;
    remedy: the flag that an error names.
    """
    if not marlin_drops(scales.float()).any():
        return scales, None
    scales = without_idle_blocks(scales, codes)
    values = scales.float()
    if not marlin_drops(values).any():
        return scales, None
    largest = values.flatten(1).amax(-1)
    shift = torch.where(largest > 0, (E4M3_MAX / largest).log2().floor(), 0.0)
    lifted = torch.ldexp(values, shift.reshape(-1, *[1] * (values.ndim - 1)))
    lost = marlin_drops(lifted).flatten(1).any(-1)
    if lost.any():
        raise ScaleError(
            f"{int(lost.sum())} of {len(lost)} {items} (the first is {int(lost.nonzero()[0])}) have"
            f" block scales more than {E4M3_MAX / MARLIN_SMALLEST:.0f} times apart, and Marlin"
            f" would drop the smaller ones; {remedy} holds them"
        )
    return lifted.to(torch.float8_e4m3fn), shift


def without_idle_blocks(scales: Tensor, codes: Tensor) -> Tensor:
    """Block scales [..., K/16] with 0 for blocks whose codes [..., K/2] are all 0.

    Such blocks are 0 with any scale, so Marlin may drop it. Quantizers give them arbitrary scales:
    ModelOpt 2^-9 for weights of almost 0.
    """
    some_rows = codes.flatten(0, -2).split(ROWS_AT_A_TIME)
    used = torch.cat([(rows.unflatten(-1, (-1, 8)) & 0x77).ne(0).any(-1) for rows in some_rows])
    return torch.where(used.view_as(scales), scales.view(torch.uint8), 0).view(torch.float8_e4m3fn)


def marlin_drops(values: Tensor) -> Tensor:
    """A mask of a layer's block scales (in float32) that Marlin drops after its shift of the
    layer.
    """
    largest = values.amax()
    shift = torch.where(largest > 0, (E4M3_MAX / largest).log2().floor(), 0.0)
    return (values > 0) & (torch.ldexp(values, shift) < MARLIN_SMALLEST)


class MergedExperts(NamedTuple):
    """The changed scales of E gated experts: block scales [E, 2I, H/16], others float32 [E]."""

    w13_scales: Tensor
    w13_global_scale: Tensor
    w2_global_scale: Tensor
    w2_input_scale: Tensor | None


def merge_gate_up(
    w13_scales: Tensor,
    w13_global_scales: Tensor,
    w2_global_scale: Tensor,
    w2_input_scale: Tensor | None,
    linear_in_up: bool,
) -> MergedExperts:
    """Merge the global scales of gate and up of each expert, multipliers [E, 2], into one.

    If the ratio does not fold into the block scales, the expert gets gate's scale. Its up
    projection and the input of w2 are then multiplied by gate/up, so w2's multiplier is multiplied
    by up/gate and the scale of w2's quantized input by gate/up. That needs an activation that is
    linear in up (linear_in_up): SiLU and GELU gates are, clamped ones are not. Raises ScaleError
    otherwise.
    """
    _check_global_scales(w13_global_scales)
    _check_global_scales(w2_global_scale)
    scales = w13_scales.clone()
    gate, up = w13_global_scales.float().unbind(-1)
    common, ratio = gate.clone(), torch.ones_like(gate)
    half = scales.shape[1] // 2
    unfolded = []
    for expert in (gate != up).nonzero().flatten().tolist():
        pair = (float(gate[expert]), float(up[expert]))
        # Fold up's rows to gate's scale, or else gate's rows to up's scale.
        for side, rows in ((0, slice(half, None)), (1, slice(None, half))):
            folded = fold(scales[expert, rows], (pair[1 - side], pair[side]))
            if folded is not None:
                scales[expert, rows], common[expert] = folded, pair[side]
                break
        else:
            unfolded.append(expert)
            ratio[expert] = up[expert] / gate[expert]
    if unfolded and not linear_in_up:
        raise ScaleError(
            f"gate and up of {len(unfolded)} of {len(gate)} experts (the first is {unfolded[0]})"
            " have global scales that cannot be made one exactly, and this layer's activation is"
            " not linear in up"
        )
    input_scale = None if w2_input_scale is None else w2_input_scale / ratio
    return MergedExperts(scales, common, w2_global_scale * ratio, input_scale)


def lift_experts_for_marlin(
    scales: Tensor, global_scale: Tensor, codes: Tensor
) -> tuple[Tensor, Tensor]:
    """Block scales [E, N, K/16] and multipliers [E] with each expert shifted up to 448 by a power
    of two.

    Marlin shifts all experts by the same power of two, which the largest scale of all limits.
    codes: uint8 [E, N, K/2], which show the scales in use. Returns the arguments if Marlin drops
    nothing. Raises ScaleError for an expert whose scales have a larger range than Marlin's.
    """
    lifted, shift = _lift(scales, codes, "experts", "--moe-backend humming")
    return lifted, global_scale if shift is None else torch.ldexp(global_scale.float(), -shift)


def _check_global_scales(values: Tensor) -> None:
    values = values.float()
    if not bool((values.isfinite() & (values > 0)).all()):
        raise ScaleError(
            f"global scales must be finite and positive, found {values.flatten()[:8].tolist()}"
        )

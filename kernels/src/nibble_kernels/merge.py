"""Exact global scales for layers that are fused from several quantized tensors (q/k/v, gate/up), in
plain torch.

A checkpoint gives each tensor i a global scale g_i: weight = e2m1 * e4m3(block scale) * g_i. A
fused layer has one, G, and vLLM 0.32 takes max(g_i) (or min, or gate's) and leaves the block scales
alone, which multiplies tensor i by G/g_i. Here nothing is multiplied: a ratio goes into the block
scales where every product is an E4M3 value, else into a float32 factor for each output column,
applied after the matrix product.

Marlin keeps block scales s as sign-less E5M3 and drops what is below 2^-6 after the layer was
shifted up to 448 (vllm 0.32 marlin_utils_fp4.py:117). For it, rows are shifted each on its own,
which is exact too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nibble_kernels.conversions.reference import E4M3_MAX, e4m3_encode

MARLIN_SMALLEST = 2.0**-6
ROWS_AT_A_TIME = 4096  # of codes: bounds the memory of what is computed from them


class Merged(NamedTuple):
    """Block scales float8_e4m3fn [N, K/16], one global scale float32 [], and factors float32 [N]
    of the outputs, or None.
    """

    scales: Tensor
    global_scale: Tensor
    column_scale: Tensor | None


class ScaleError(ValueError):
    """Scales that cannot be held exactly, or that no loader wrote."""


def merge_scales(
    scales: Tensor, global_scales: Tensor, widths: Sequence[int], marlin_codes: Tensor | None = None
) -> Merged:
    """One global scale for tensors of `widths` rows each, with block scales [N, K/16] and
    multipliers float32 [len(widths)].

    `marlin_codes`, uint8 [N, K/2], are the weights' codes where Marlin will multiply, so that no
    block scale in use is one it drops. The result dequantizes to the same values: e2m1 * scales *
    global_scale * column_scale, bit for bit in real arithmetic but for the float32 rounding of a
    column factor (2^-24); where nothing is to be changed it holds `scales` itself. Raises
    ScaleError for scales that are not finite and positive, and for rows whose block scales span
    more than Marlin holds.
    """
    _check_global_scales(global_scales)
    own = [float(value) for value in global_scales.float().tolist()]
    if len(set(own)) == 1:
        merged, common, column = scales, own[0], None
    else:
        merged, common, column = _merge_unequal(scales, own, list(widths))
    if marlin_codes is not None:
        merged, column = _fit_marlin(merged, column, marlin_codes)
    return Merged(merged, torch.tensor(common, dtype=torch.float32, device=scales.device), column)


def _merge_unequal(
    scales: Tensor, own: Sequence[float], widths: list[int]
) -> tuple[Tensor, float, Tensor | None]:
    """Block scales, the global scale and column factors."""
    parts = list(scales.split(widths))
    common, folded = _best_common(parts, own)
    factors = [
        1.0 if part is not None else value / common for part, value in zip(folded, own, strict=True)
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
    """Block scales that mean with ratio_of[1] what `scales` mean with ratio_of[0]; None where
    one is not an E4M3 value.
    """
    own, common = ratio_of
    if own == common:
        return scales
    # 4 bits of an E4M3 times 24 of a float32: both products are exact in float64, so equality is.
    wanted = scales.double() * own
    folded = e4m3_encode((wanted / common).float()).view(torch.float8_e4m3fn)
    return folded if torch.equal(folded.double() * common, wanted) else None


def _best_common(
    parts: Sequence[Tensor], own: Sequence[float]
) -> tuple[float, list[Tensor | None]]:
    """The global scale with which most rows fold, the largest first among equals; and the folded
    block scales.
    """
    best: tuple[int, float, list[Tensor | None]] | None = None
    for common in sorted(set(own), reverse=True):
        folded = [fold(part, (value, common)) for part, value in zip(parts, own, strict=True)]
        rows = sum(part.shape[0] for part in folded if part is not None)
        if best is None or rows > best[0]:
            best = (rows, common, folded)
    assert best is not None
    return best[1], best[2]


def _fit_marlin(
    scales: Tensor, column: Tensor | None, codes: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Shift rows so that no block scale is dropped, with the inverse in the column factors."""
    lifted, shift = _lift(scales, codes, "rows", "--linear-backend humming")
    if shift is None:
        return lifted, column
    factor = torch.ldexp(torch.ones_like(shift), -shift)
    return lifted, factor if column is None else column * factor


def _lift(scales: Tensor, codes: Tensor, what: str, way_out: str) -> tuple[Tensor, Tensor | None]:
    """Block scales [R, …, K/16] of `what` with each of R shifted up to 448 by a power of two, and
    the exponents float32 [R].

    Where nothing is dropped: the scales themselves, or those of blocks in use, and None.
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
            f"{int(lost.sum())} of {len(lost)} {what} (the first is {int(lost.nonzero()[0])}) have"
            f" block scales more than {E4M3_MAX / MARLIN_SMALLEST:.0f} times apart, and Marlin"
            f" would drop the smaller ones; {way_out} holds them"
        )
    return lifted.to(torch.float8_e4m3fn), shift


def without_idle_blocks(scales: Tensor, codes: Tensor) -> Tensor:
    """Block scales [..., K/16] with 0 for blocks whose codes [..., K/2] are all 0, which mean 0
    with any scale.

    Quantizers give such blocks arbitrary scales, ModelOpt 2^-9 where weights are almost 0; Marlin
    may drop those.
    """
    some_rows = codes.flatten(0, -2).split(ROWS_AT_A_TIME)
    used = torch.cat([(rows.unflatten(-1, (-1, 8)) & 0x77).ne(0).any(-1) for rows in some_rows])
    return torch.where(used.view_as(scales), scales.view(torch.uint8), 0).view(torch.float8_e4m3fn)


def marlin_drops(values: Tensor) -> Tensor:
    """Which of a layer's block scales (as float) Marlin would take for zero, after its own shift
    of the whole.
    """
    largest = values.amax()
    shift = torch.where(largest > 0, (E4M3_MAX / largest).log2().floor(), 0.0)
    return (values > 0) & (torch.ldexp(values, shift) < MARLIN_SMALLEST)


class MergedExperts(NamedTuple):
    """What changes in a layer of E gated experts. Block scales [E, 2I, H/16]; the rest float32
    [E].
    """

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
    """One global scale for gate and up of each expert, from multipliers [E, 2].

    An expert whose ratio does not fold keeps gate's scale: its up projection, and with it the input
    of w2, comes out multiplied by gate/up, so w2's multiplier is multiplied by up/gate, and the
    scale of w2's quantized input by gate/up. That needs an activation linear in up (`linear_in_up`:
    SiLU and GELU gates are, clamped ones are not); without it, ScaleError names the experts.
    """
    _check_global_scales(w13_global_scales)
    _check_global_scales(w2_global_scale)
    scales = w13_scales.clone()
    gate, up = w13_global_scales.float().unbind(-1)
    common, ratio = gate.clone(), torch.ones_like(gate)
    half = scales.shape[1] // 2
    unfolded = []
    for expert in (gate != up).nonzero().flatten().tolist():
        own = (float(gate[expert]), float(up[expert]))
        for side, rows in (
            (0, slice(half, None)),
            (1, slice(None, half)),
        ):  # into gate's scale, or into up's
            folded = fold(scales[expert, rows], (own[1 - side], own[side]))
            if folded is not None:
                scales[expert, rows], common[expert] = folded, own[side]
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
    of two, where needed.

    Marlin shifts all experts alike, by what the largest scale of any of them allows. `codes`, uint8
    [E, N, K/2], tell which scales are in use. Returns the arguments themselves where nothing is
    dropped. Raises ScaleError where an expert's own scales span more than Marlin holds.
    """
    lifted, shift = _lift(scales, codes, "experts", "--moe-backend humming")
    return lifted, global_scale if shift is None else torch.ldexp(global_scale.float(), -shift)


def _check_global_scales(values: Tensor) -> None:
    values = values.float()
    if not bool((values.isfinite() & (values > 0)).all()):
        raise ScaleError(
            f"global scales must be finite and positive, found {values.flatten()[:8].tolist()}"
        )

"""FP8 linear layers with few rows: nibble's kernel, whose activations are BF16, with each kind of
scales, or a layer of vLLM's, against float64; then times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from nibble.trials.trial import Trial, shape_name
from nibble.trials.worker.fp8 import BLOCK, Kind, Numbers, quantized, uneven
from nibble.trials.worker.kernels import Prepared, Refused, require_compiled
from nibble.trials.worker.linear import first_call, timed
from nibble.trials.worker.planted import Product, with_fault
from nibble.trials.worker.tasks import Teller
from nibble.trials.worker.timing import beside_others
from nibble.trials.worker.truth import (
    PART_OF_NORMS,
    PART_OF_RESULT,
    ROW_LIMITS,
    activations,
    compared_rows,
    judge,
    outcome,
)

KINDS: Mapping[str, Kind] = {"fp8": "tensor", "fp8-channel": "channel", "fp8-block": "block"}
BLOCK_ROW_MULTIPLE = 16  # of a weight with scales of blocks
# vLLM rounds activations to E4M3, with a static scale or one that it finds, and some of its kernels
# round scales too. A result's error is 0.027 to 0.04 of |x| |w| / sqrt(K); six times that may be.
ROUNDED = "fp8"
ROUNDED_ROW_LIMIT, ROUNDED_PART = 0.06, 6 * 0.04


@torch.inference_mode()
def run(trial: Trial, say: Teller) -> dict[str, Any]:
    """The verdict over all shapes and kinds of scales; times of the first kind."""
    worst, ran, times = 0.0, "", dict[str, dict[str, float]]()
    form = trial.kernel.rpartition(":")[2]
    kinds = (KINDS[form],) if form in KINDS else get_args(Kind)
    try:
        for shape in trial.shapes:
            for kind in kinds:
                if kind == "block" and shape[0] % BLOCK_ROW_MULTIPLE:
                    continue
                say(f"prepare:{shape_name(shape)}, scales of a {kind}")
                given = uneven(shape[0], shape[1], BLOCK, trial.device, 3)
                weight = quantized(given, kind, BLOCK)
                prepared = _prepared(trial, weight, kind)
                ran = prepared.ran
                with beside_others(trial.lock):
                    fault, error = _compared(trial, prepared, weight, kind, say)
                worst = max(worst, error)
                if fault:
                    return outcome(fault, worst, ran=ran, times=times)
                if kind == kinds[0] and trial.timed_rows:
                    times[shape_name(shape)] = timed(trial, prepared, shape, say)
                    say.times(shape_name(shape), times[shape_name(shape)])
                torch.cuda.empty_cache() if trial.device == "cuda" else None
    except Refused as why:
        return {"verdict": "refused", "detail": str(why)}
    return outcome("", worst, ran=ran, times=times)


def _prepared(trial: Trial, weight: Numbers, kind: Kind) -> Prepared:
    if trial.kernel.startswith("vllm"):
        from nibble.trials.worker.vllm_e4m3 import vllm_e4m3_layer

        return vllm_e4m3_layer(weight, kind)
    require_compiled(trial.device)
    return _ours(weight, kind)


def _ours(weight: Numbers, kind: Kind) -> Prepared:
    """With a bias where rows have scales, as `_bias` has it."""
    from nibble_kernels.e4m3_linear import e4m3_decode_linear, prepare_e4m3_scales

    block = (BLOCK, BLOCK) if kind == "block" else None
    scales = prepare_e4m3_scales(weight.codes, weight.scales, block=block)
    bias = _bias(weight, kind, is_ours=True)

    def product(codes: Tensor) -> Product:
        return lambda x: e4m3_decode_linear(x, codes, scales, bias=bias)

    return Prepared(
        product(weight.codes), ran="nibble", again=lambda: product(weight.codes.clone())
    )


def _bias(weight: Numbers, kind: Kind, is_ours: bool) -> Tensor | None:
    if not is_ours or kind != "channel":
        return None
    return activations(1, len(weight.codes), str(weight.codes.device), seed=5)[0]


def _compared(
    trial: Trial, prepared: Prepared, weight: Numbers, kind: Kind, say: Teller
) -> tuple[str, float]:
    """The first fault, empty if all products are right, and the largest error."""
    rows_of_weight, columns = weight.codes.shape
    half = compared_rows(rows_of_weight, trial.device)
    chosen = torch.cat((half, half + rows_of_weight // 2))
    values = _values(weight, chosen)
    norms_of_weight = values.norm(dim=-1)
    bias = _bias(weight, kind, prepared.form != ROUNDED)
    limit, part = ROW_LIMITS["bf16"], PART_OF_NORMS["bf16"]
    if prepared.form == ROUNDED:
        limit, part = ROUNDED_ROW_LIMIT, ROUNDED_PART / columns**0.5
    product, worst = with_fault(prepared.product, trial.plant), 0.0
    for rows in trial.rows:
        place = f"{shape_name(weight.codes.shape)} with {rows} rows, scales of a {kind}"
        x = activations(rows, columns, trial.device)
        first_call(trial, prepared, (rows_of_weight, columns), x, say)
        say(f"run:{place}")
        y = product(x)
        if y.shape != (rows, rows_of_weight):
            return f"{place}: the result has the shape {list(y.shape)}", float("inf")
        if not y.isfinite().all():
            return f"{place}: NaN or infinity", float("inf")
        right = x.double() @ values.T
        bound = PART_OF_RESULT * right.abs() + part * x.double().norm(dim=-1)[:, None] * (
            norms_of_weight
        )
        if bias is not None:
            right += bias.double()[chosen]
        fault, error = judge(y[:, chosen].double(), right, bound, limit, place)
        worst = max(worst, error)
        if fault:
            return fault, worst
    return "", worst


def _values(weight: Numbers, rows: Tensor) -> Tensor:
    """Some rows of a weight in float64."""
    scales = weight.scales[rows // weight.rows].double()
    scales = scales.repeat_interleave(weight.columns, 1)[:, : weight.codes.shape[1]]
    return weight.codes[rows].float().double() * scales

"""nibble's product with a BF16 head on the CPU, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from nibble_kernels.bf16_linear import bf16_linear

from nibble.trials.trial import Trial, shape_name
from nibble.trials.worker.planted import with_fault
from nibble.trials.worker.truth import PART_OF_RESULT, ROW_LIMITS, activations, judge, outcome


@torch.inference_mode()
def run(trial: Trial, say: Callable[[str], None]) -> dict[str, Any]:
    worst = 0.0
    for shape in trial.shapes:
        weight = activations(shape[0], shape[1], trial.device, seed=3)
        for rows in trial.rows:
            place = f"{shape_name(shape)} with {rows} rows"
            say(f"run:{place}")
            x = activations(rows, shape[1], trial.device)
            y = with_fault(lambda x, w=weight: bf16_linear(x, w), trial.plant)(x)
            if not y.isfinite().all():
                return outcome(f"{place}: NaN or infinity", None)
            right = x.double() @ weight.double().T
            norms = x.double().norm(dim=-1)[:, None] * weight.double().norm(dim=-1)
            bound = PART_OF_RESULT * right.abs() + 2.0**-12 * norms
            fault, error = judge(y.double(), right, bound, ROW_LIMITS["bf16"], place)
            worst = max(worst, error)
            if fault:
                return outcome(fault, worst)
    return outcome("", worst, ran="nibble")

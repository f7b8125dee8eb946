"""nibble's quantization of activations: its codes and scales are the specification's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from nibble_kernels.activation_quant import nvfp4_quant, reference

from nibble.trials.trial import Trial
from nibble.trials.worker.kernels import INPUT_SCALE
from nibble.trials.worker.truth import activations, outcome


@torch.inference_mode()
def run(trial: Trial, say: Callable[[str], None]) -> dict[str, Any]:
    inverse = torch.tensor(1 / INPUT_SCALE)
    for _, columns in trial.shapes:
        for rows in trial.rows:
            say(f"run:{rows} rows of {columns}")
            x = activations(rows, columns, "cpu")
            found = nvfp4_quant(x.to(trial.device), inverse.to(trial.device), tiled=False)
            right = reference.nvfp4_quant(x, inverse, tiled=False, exact=True)
            for what, one, other in zip(("codes", "scales"), found, right, strict=True):
                bytes_ = one.cpu().view(torch.uint8).clone()
                if trial.plant:
                    bytes_.view(-1)[3] ^= 1
                if wrong := int((bytes_ != other.view(torch.uint8)).sum()):
                    return outcome(f"{rows} rows of {columns}: {wrong} {what} differ", None)
    return outcome("", 0.0, ran="nibble")

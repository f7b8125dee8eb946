"""Bytes per second that this device reads and copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nibble.trials.trial import Trial
from nibble.trials.worker.timing import alone, seconds_of

GPU_BYTES, CPU_BYTES = 1 << 30, 1 << 28
REPEATS = 4


@torch.inference_mode()
def run(trial: Trial, say: Callable[[str], None]) -> dict[str, Any]:
    say("wait:for its turn")
    with alone(trial.lock):
        say("prepare:memory")
        nbytes = GPU_BYTES if trial.device == "cuda" else CPU_BYTES
        if trial.device == "cuda":
            nbytes = min(nbytes, torch.cuda.mem_get_info()[0] // 4 & ~7)
        x = torch.ones(nbytes // 8, dtype=torch.int64, device=trial.device)
        y = torch.empty_like(x)
        say("run:reads and copies")
        read = seconds_of([_reader(x)] * REPEATS, trial.device, 0.5)
        copy = seconds_of([lambda: y.copy_(x)] * REPEATS, trial.device, 0.5)
    facts = {
        "read_gb_per_s": round(nbytes / read / 1e9, 1),
        "copy_gb_per_s": round(2 * nbytes / copy / 1e9, 1),  # it reads and writes
        "bytes": nbytes,
    }
    return {"verdict": "right", "facts": facts}


def _reader(x: torch.Tensor) -> Callable[[], object]:
    if x.is_cuda:
        return lambda: torch.sum(x)
    from nibble_kernels.memory import read_memory

    as_bytes = x.view(torch.uint8)
    return lambda: read_memory(as_bytes)

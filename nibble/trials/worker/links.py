"""Copies between the GPUs of this machine, and NCCL's all-reduce over all of them.

A process for each GPU; on some hosts with PCIe boards both hang. The first process starts the
others, which end with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from nibble.trials.trial import Trial

ELEMENTS = 1 << 24  # float32: 64 MiB
ROUNDS = 5
RANK, FOLDER = "TRIAL_RANK", "TRIAL_FOLDER"


def run(trial: Trial, say: Callable[[str], None]) -> dict[str, Any]:
    """Rank 0 copies between pairs first; then all ranks reduce."""
    gpus = torch.cuda.device_count()
    if rank := int(os.environ.get(RANK, "0")):
        return _reduced(rank, gpus, os.environ[FOLDER])
    if gpus < 2:
        return {"verdict": "refused", "detail": f"this machine shows {gpus} GPU"}
    say("run:copies between GPUs")
    facts: dict[str, Any] = {"gpus": gpus, "pairs": _pairs(gpus)}
    wrong = [pair for pair in facts["pairs"] if not pair["equal"]]
    if wrong:
        detail = f"a copy from GPU {wrong[0]['from']} to {wrong[0]['to']} has other bytes"
        return {"verdict": "wrong", "detail": detail, "facts": facts}
    say("prepare:NCCL's all-reduce")
    with tempfile.TemporaryDirectory() as folder:
        others = [_start(trial, number, folder) for number in range(1, gpus)]
        try:
            return _reduced(0, gpus, folder, facts)
        finally:
            for other in others:
                other.kill()


def _pairs(gpus: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for source in range(gpus):
        for target in range(gpus):
            if source == target:
                continue
            x = torch.arange(ELEMENTS, device=f"cuda:{source}", dtype=torch.int32)
            y = torch.zeros_like(x, device=f"cuda:{target}")
            y.copy_(x)
            torch.cuda.synchronize(target)
            began = time.perf_counter()
            for _ in range(ROUNDS):
                y.copy_(x)
            torch.cuda.synchronize(source)
            torch.cuda.synchronize(target)
            seconds = (time.perf_counter() - began) / ROUNDS
            found.append(
                {
                    "from": source,
                    "to": target,
                    "peer": torch.cuda.can_device_access_peer(source, target),
                    "gb_per_s": round(x.numel() * 4 / seconds / 1e9, 1),
                    "equal": bool(torch.equal(y.cpu(), x.cpu())),
                }
            )
    return found


def _start(trial: Trial, rank: int, folder: str) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-m", "nibble.trials.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={**os.environ, RANK: str(rank), FOLDER: folder},
    )
    assert child.stdin is not None
    child.stdin.write(json.dumps(trial.to_json()).encode() + b"\n")
    child.stdin.close()
    return child


def _reduced(
    rank: int, gpus: int, folder: str, facts: dict[str, Any] | None = None
) -> dict[str, Any]:
    from torch import distributed

    torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=gpus,
        timeout=timedelta(seconds=60),
    )
    x = torch.full((ELEMENTS,), float(rank + 1), device="cuda")
    distributed.all_reduce(x)
    torch.cuda.synchronize()
    is_right = bool((x == gpus * (gpus + 1) / 2).all())
    y = torch.ones_like(x)
    began = time.perf_counter()
    for _ in range(ROUNDS):
        distributed.all_reduce(y)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / ROUNDS
    rate = 2 * (gpus - 1) / gpus * ELEMENTS * 4 / seconds / 1e9
    facts = (facts or {}) | {"all_reduce_gb_per_s": round(rate, 1)}
    if not is_right:
        return {"verdict": "wrong", "detail": "the all-reduce has another sum", "facts": facts}
    return {"verdict": "right", "facts": facts}

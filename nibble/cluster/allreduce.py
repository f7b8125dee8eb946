"""One rank of the preflight's all-reduce: `python -m nibble.cluster.allreduce RANK WORLD …`.

It uses NCCL on the first GPU, or Gloo without a GPU, and prints one JSON object. `gb_per_s` is the
bus bandwidth as nccl-tests define it: 2 (n-1)/n times the buffer's bytes, per second, in 10^9
bytes. `library` is the NCCL library that this process loaded.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from nibble.machine.processes import die_with_parent

TIMEOUT_S = 60
GPU_BYTES, CPU_BYTES = 64 << 20, 8 << 20
ROUNDS = 5


def measure(rank: int, world: int, head: str, port: int) -> dict[str, Any]:
    """Join the group, reduce ROUNDS times, check each sum, and take the best time."""
    import torch
    from torch import distributed

    has_cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if has_cuda else torch.device("cpu")
    backend = "nccl" if has_cuda else "gloo"
    nbytes = GPU_BYTES if has_cuda else CPU_BYTES
    distributed.init_process_group(
        backend,
        init_method=f"tcp://{head}:{port}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    try:
        values = torch.empty(nbytes // 4, dtype=torch.float32, device=device)
        seconds = []
        for _ in range(ROUNDS + 1):
            values.fill_(rank + 1)
            distributed.barrier()
            _finish(has_cuda)
            began = time.perf_counter()
            distributed.all_reduce(values)
            _finish(has_cuda)
            seconds.append(time.perf_counter() - began)
            is_right = bool((values == world * (world + 1) / 2).all())
            if not is_right:
                break
    finally:
        distributed.destroy_process_group()
    best_s = min(seconds[1:] or seconds)  # the first round opens the connections
    rate = 2 * (world - 1) / world * nbytes / best_s / 1e9
    return {
        "right": is_right,
        "gb_per_s": round(rate, 4),
        "backend": backend,
        "bytes": nbytes,
        "library": loaded("libnccl"),
    }


def _finish(cuda: bool) -> None:
    if cuda:
        import torch

        torch.cuda.synchronize()


def loaded(name: str) -> str | None:
    """The path of a shared library that this process has mapped, or None."""
    match = re.search(rf"(/\S*/{name}[^/\s]*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return match[1] if match else None


if __name__ == "__main__":
    die_with_parent(os.getppid())()  # leaves no process behind if the node stops
    rank, world, head, port = sys.argv[1:]
    print(json.dumps(measure(int(rank), int(world), head, int(port))))

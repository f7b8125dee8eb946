"""One rank of the preflight's all-reduce: `python -m nibble.cluster.allreduce RANK WORLD …`.

NCCL on the first GPU where there is one, else Gloo. Prints one JSON object: `gb_per_s` is the bus
bandwidth, 2 (n-1)/n times the bytes of the buffer a second (10^9), as nccl-tests count it;
`library` is the NCCL that was really loaded.
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
    """Join, reduce, check the sum, take the time."""
    import torch
    from torch import distributed

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    backend = "nccl" if cuda else "gloo"
    nbytes = GPU_BYTES if cuda else CPU_BYTES
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
            _finish(cuda)
            began = time.perf_counter()
            distributed.all_reduce(values)
            _finish(cuda)
            seconds.append(time.perf_counter() - began)
            right = bool((values == world * (world + 1) / 2).all())
            if not right:
                break
    finally:
        distributed.destroy_process_group()
    best = min(seconds[1:] or seconds)  # the first one opens the connections
    rate = 2 * (world - 1) / world * nbytes / best / 1e9
    return {
        "right": right,
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
    """The file of a shared library that this process has mapped."""
    match = re.search(rf"(/\S*/{name}[^/\s]*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return match[1] if match else None


if __name__ == "__main__":
    die_with_parent(os.getppid())()  # a node that is stopped meanwhile leaves nothing behind
    given = sys.argv[1:]
    print(json.dumps(measure(int(given[0]), int(given[1]), given[2], int(given[3]))))

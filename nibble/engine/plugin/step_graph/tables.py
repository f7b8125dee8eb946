"""Tables of request slots at fixed addresses of the device.

vLLM's UvaBackedTensor (vllm 0.32 v1/worker/gpu/buffer_utils.py:132) keeps two pinned host buffers
and lets kernels read one after the other through `gpu`, which changes with each write. A CUDA graph
needs one address. Here `gpu` is one tensor on the device, and a write that changes nothing copies
nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu import buffer_utils

from nibble.engine.plugin.require import required, required_of_instances


@functools.cache
def fix_addresses() -> None:
    """Make the `gpu` of each UvaBackedTensor that is created from now on one device tensor.

    Raises VllmMismatch.
    """
    backed = required(buffer_utils, "UvaBackedTensor")
    create = required(backed, "__init__", "self", "size", "dtype")
    required(backed, "copy_to_uva", "self")
    required_of_instances(backed, "cpu", "np", "pool", "gpu")

    def create_fixed(table: Any, *arguments: Any, **options: Any) -> None:
        create(table, *arguments, **options)
        table.gpu = table.gpu.clone()
        table.sent = table.np.copy()

    def copy_changes(table: Any, n: int | None = None) -> torch.Tensor:
        if not np.array_equal(table.np, table.sent):
            np.copyto(table.sent, table.np)
            # The pool alternates between pinned buffers, as many as steps may be in flight.
            table.gpu.copy_(table.pool.copy_to_uva(table.np), non_blocking=True)
        return table.gpu if n is None else table.gpu[:n]

    backed.__init__ = create_fixed
    backed.copy_to_uva = copy_changes

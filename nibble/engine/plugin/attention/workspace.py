"""Partial results of decode attention: one buffer for each device, which layers use in turns."""

from __future__ import annotations

from dataclasses import replace

import torch
from nibble_kernels.decode_attention import Workspace, decode_attention, make_workspace

from nibble.engine.decode_attention import PAGE, AttentionShape, sequences_at_a_time

_workspaces: dict[torch.device, Workspace] = {}
_warm: set[tuple[torch.device, AttentionShape, int]] = set()


def workspace_of(device: torch.device) -> Workspace:
    """The workspace of a device with an index, such as cuda:0."""
    return _workspaces[device]


def reserve(shape: AttentionShape, requests: int, most_queries: int, device: torch.device) -> None:
    """Make the device's workspace large enough for layers of `shape`, and set the kernel up.

    Called while the model loads: vLLM then counts the memory, and no CUDA graph captures the
    kernel's first call.
    """
    key = (device, shape, most_queries)
    if key in _warm:
        return

    def new(sequences: int, device: torch.device) -> Workspace:
        return make_workspace(
            sequences,
            shape.kv_heads,
            shape.group,
            shape.head_dim,
            most_queries=most_queries,
            device=device,
        )

    one = new(1, torch.device("meta"))
    needed = new(sequences_at_a_time(one.partials.numel() * 4, requests), torch.device("meta"))
    known = _workspaces.get(device)
    floats, counters = needed.partials.numel(), needed.counters.numel()
    if known is None or known.partials.numel() < floats or known.counters.numel() < counters:
        if known is not None:
            floats = max(floats, known.partials.numel())
            counters = max(counters, known.counters.numel())
        _workspaces[device] = Workspace(
            torch.empty(floats, dtype=torch.float32, device=device),
            torch.zeros(counters, dtype=torch.int32, device=device),
        )
    if device.type == "cuda":
        for queries in {1, most_queries}:
            _set_up(shape, queries, device)
    _warm.add(key)


def _set_up(shape: AttentionShape, queries: int, device: torch.device) -> None:
    """Compute a padded request as of few and as of many."""
    dtype = torch.float8_e4m3fn if shape.cache.startswith("fp8") else torch.bfloat16
    query = torch.zeros(queries, shape.heads, shape.head_dim, dtype=torch.bfloat16, device=device)
    cache = torch.zeros(
        1, shape.kv_heads, PAGE, 2 * shape.head_dim, dtype=torch.uint8, device=device
    )
    cache = cache.repeat(1, 1, 1, dtype.itemsize).view(dtype)
    numbers = torch.tensor([0, 0, queries], dtype=torch.int32, device=device)
    workspace = workspace_of(device)
    for each in (workspace, replace(workspace, most_clustered=0)):
        decode_attention(
            query,
            cache,
            numbers[:1, None],
            numbers[:1],
            numbers[1:],
            each,
            most_queries=queries,
            scale=1.0,
        )

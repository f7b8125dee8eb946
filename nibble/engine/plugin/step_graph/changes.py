"""Brings a step's new cache blocks to the device: one small copy, applied inside the graph.

vLLM stages them in three lists and launches a kernel from Python for each step with a new block
(vllm 0.32 v1/worker/gpu/block_table.py:136).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.triton_utils import tl, triton

NewBlocks = tuple[Sequence[int], ...]  # for each group of the KV cache
_FIELDS = 4  # of a change: group, row, column, block
_PER_TABLE = 2  # changes of one step, for each row of each group's table


class PinnedRing:
    """Pinned host arrays that take turns, so that a copy in flight is not overwritten."""

    def __init__(self, size: int, dtype: torch.dtype, depth: int) -> None:
        self._tensors = [torch.zeros(size, dtype=dtype, pin_memory=True) for _ in range(depth)]
        self._arrays = [tensor.numpy() for tensor in self._tensors]
        self._turn = 0

    def take(self) -> tuple[torch.Tensor, np.ndarray]:
        """The next one, as a tensor and as an array of the same memory."""
        self._turn = (self._turn + 1) % len(self._tensors)
        return self._tensors[self._turn], self._arrays[self._turn]


class BlockChanges:
    """The new cache blocks of one step: a number of changes, then the fields of each."""

    def __init__(self, tables: Any, depth: int) -> None:
        self._tables = tables
        self._limit = _PER_TABLE * tables.max_num_reqs * max(1, tables.num_kv_cache_groups)
        size = 1 + _FIELDS * self._limit
        self._device = torch.zeros(size, dtype=torch.int32, device=tables.device)
        self._ring = PinnedRing(size, torch.int32, depth)

    def has_room(self, rows: Iterable[tuple[int, NewBlocks]]) -> bool:
        """Whether `send` takes these blocks, and the block tables have room for them."""
        tables, count = self._tables, 0
        for row, groups in rows:
            for group, blocks in enumerate(groups):
                end = int(tables.num_blocks.np[group, row]) + len(blocks)
                if end > tables.block_tables[group].gpu.shape[1]:
                    return False
                count += len(blocks)
        return count <= self._limit

    def send(self, rows: Iterable[tuple[int, NewBlocks]]) -> None:
        """Copy the changes to the device, where the next `apply` writes them."""
        table, found = self._tables.num_blocks, list[int]()
        for row, groups in rows:
            for group, blocks in enumerate(groups):
                column = int(table.np[group, row])
                for block in blocks:
                    found += (group, row, column, block)
                    column += 1
                # The graph also writes the number of blocks.
                table.np[group, row] = table.sent[group, row] = column
        tensor, array = self._ring.take()
        size = 1 + len(found)
        array[0] = len(found) // _FIELDS
        array[1:size] = found
        self._device[:size].copy_(tensor[:size], non_blocking=True)

    def apply(self) -> None:
        """Write what was sent into the block tables. To be captured."""
        tables = self._tables
        if not tables.num_kv_cache_groups:
            return
        launcher: Any = _write_blocks
        launcher[(1,)](
            self._device,
            tables.block_table_ptrs,
            tables.block_table_strides,
            tables.num_blocks.gpu,
            tables.num_blocks.gpu.stride(0),
            BLOCK=128,
        )
        self._device[:1].zero_()


@triton.jit
def _write_blocks(
    changes,
    table_pointers,  # [groups]
    table_strides,  # [groups]
    num_blocks,  # [groups, slots]
    num_blocks_stride,
    BLOCK: tl.constexpr,
):
    count = tl.load(changes)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_one = at < count
        change = changes + 1 + at * 4
        group = tl.load(change, mask=is_one, other=0)
        row = tl.load(change + 1, mask=is_one, other=0)
        column = tl.load(change + 2, mask=is_one, other=0)
        block = tl.load(change + 3, mask=is_one, other=0)
        table = tl.load(table_pointers + group, mask=is_one, other=0)
        table = tl.cast(table, tl.pointer_type(tl.int32))
        stride = tl.load(table_strides + group, mask=is_one, other=0)
        tl.store(table + row.to(tl.int64) * stride + column, block, mask=is_one)
        tl.atomic_max(num_blocks + group * num_blocks_stride + row, column + 1, mask=is_one)

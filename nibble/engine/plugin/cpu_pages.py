"""Weights in large pages on vLLM's CPU platform.

A decode step reads every weight once. The processor looks up an address for each page of it, and in
a virtual machine in two tables. Linux gives pages of 2 MiB instead of 4 KiB to memory for which a
program asks (transparent huge pages, `madvise` or `always`). Empty memory gets them when it is
written. Small weights share a page with other data, so they move once they are loaded.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms import current_platform

from nibble.engine.plugin.loaded_models import after_loading
from nibble.engine.plugin.memory_advice import madvise
from nibble.engine.plugin.require import replace, required

LARGE_PAGE_BYTES = 2 << 20
_ALLOWED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_COLLAPSE = 25  # MADV_COLLAPSE, from Linux 6.1; without it, small pages stay


def use_large_pages() -> None:
    """Follow BaseModelLoader. Raises VllmMismatch."""
    if not current_platform.is_cpu():
        return
    name = "create_model"
    create = required(BaseModelLoader, name, "self", "vllm_config", "model_config", "prefix")
    if not are_allowed():
        return

    @functools.wraps(create)
    def create_and_ask(*arguments: Any, **options: Any) -> nn.Module:
        model = create(*arguments, **options)
        ask(model.parameters())
        return model

    replace(BaseModelLoader, name, create_and_ask)

    def move_weights(model: nn.Module) -> None:
        move(model.parameters())

    after_loading(move_weights)


def are_allowed() -> bool:
    """Whether this system has large pages and its administrator left them on."""
    try:
        return "[never]" not in _ALLOWED.read_text()
    except OSError:
        return False


def ask(tensors: Iterable[Tensor]) -> None:
    """Large pages for what will be written into tensors, where they fill one."""
    for tensor in tensors:
        first = -(-tensor.data_ptr() // LARGE_PAGE_BYTES)
        end = (tensor.data_ptr() + tensor.nbytes) // LARGE_PAGE_BYTES
        if first < end and tensor.device.type == "cpu":
            size_bytes = (end - first) * LARGE_PAGE_BYTES
            madvise(first * LARGE_PAGE_BYTES, size_bytes, mmap.MADV_HUGEPAGE)


def move(tensors: Iterable[Tensor]) -> int:
    """Move tensors, and what lies between them, to large pages. Returns how many large pages hold
    a part of them.
    """
    pages: set[int] = set()
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.nbytes:
            last = (tensor.data_ptr() + tensor.nbytes - 1) // LARGE_PAGE_BYTES
            pages.update(range(tensor.data_ptr() // LARGE_PAGE_BYTES, last + 1))
    held = 0
    for page in sorted(pages):
        # Pages that are partly unmapped, or a file's, stay small.
        madvise(page * LARGE_PAGE_BYTES, LARGE_PAGE_BYTES, mmap.MADV_HUGEPAGE)
        held += madvise(page * LARGE_PAGE_BYTES, LARGE_PAGE_BYTES, _COLLAPSE)
    return held

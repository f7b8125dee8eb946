"""Mapped checkpoint files on vLLM's CPU platform: pages of weights that are copied are given back.

safetensors maps a file, and vLLM copies each tensor out of it. Without this a process that loads
holds each weight twice. The pages stay in the system's cache of files.
"""

from __future__ import annotations

import functools
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from nibble.engine.plugin.memory_advice import madvise
from nibble.engine.plugin.require import replace, required

LEAST_BYTES = 128 << 20  # that are given back at a time
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+ *(.*)")
_SMAPS = Path("/proc/self/smaps")


def give_read_pages_back() -> None:
    """Follow DefaultModelLoader.get_all_weights. Raises VllmMismatch."""
    if not current_platform.is_cpu():
        return
    read = required(DefaultModelLoader, "get_all_weights", "self", "model_config", "model")

    @functools.wraps(read)
    def read_and_give_back(*args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        pages = ReadPages()
        for name, tensor in read(*args, **kwargs):
            yield name, tensor
            pages.add(tensor)
        pages.give_back()

    replace(DefaultModelLoader, "get_all_weights", read_and_give_back)


class ReadPages:
    """Whole pages of tensors that were read."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self._bytes = 0

    def add(self, tensor: Tensor) -> None:
        """Pages of this tensor, which is copied."""
        if not tensor.is_contiguous():
            return
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end:
            self._ranges.append((first, end))
            self._bytes += end - first
        if self._bytes >= LEAST_BYTES:
            self.give_back()

    def give_back(self) -> None:
        """Those that are still pages of a file, and that nothing wrote to."""
        mapped = unchanged_files()
        for first, end in self._ranges:
            if any(low <= first and end <= high for low, high in mapped):
                madvise(first, end - first, mmap.MADV_DONTNEED)
        self._ranges, self._bytes = [], 0


def unchanged_files() -> list[tuple[int, int]]:
    """Addresses of this process's mapped safetensors files without any page that was written."""
    try:
        lines = _SMAPS.read_text().splitlines()
    except OSError:
        return []
    found, here = [], None
    for line in lines:
        if mapping := _MAPPING.fullmatch(line):
            is_weights = mapping[3].endswith(".safetensors")
            here = (int(mapping[1], 16), int(mapping[2], 16)) if is_weights else None
        elif here and line.startswith("Anonymous:") and line.split()[1] == "0":
            found.append(here)
    return found

"""The KV cache on vLLM's CPU platform: its memory is taken beside the rest of a start.

vLLM 0.32 fills it with zeros (v1/worker/utils.py:597), and the start waits for each page of it: 2 s
for 3.5 GiB. The kernel's new pages are zero. A thread takes them while the server starts, and what
a request writes before is kept.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from vllm.platforms import current_platform
from vllm.v1.worker import gpu_model_runner

from nibble.engine.plugin import cpu_pages
from nibble.engine.plugin.memory_advice import madvise
from nibble.engine.plugin.require import replace, required

LEAST_BYTES = 64 << 20
_CHUNK_BYTES = 64 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, from Linux 5.14; without it, use takes the pages
_NICE = 5  # behind the products of the first requests


def take_pages_beside_the_start() -> None:
    """Follow allocate_kv_cache. Raises VllmMismatch."""
    if not current_platform.is_cpu():
        return
    name = "allocate_kv_cache"  # a name in that module's namespace
    allocate = required(gpu_model_runner, name, "kv_cache_config", "device", "layout")

    @functools.wraps(allocate)
    def allocate_from_the_kernel(*arguments: Any, **options: Any) -> Any:
        with ZerosFromTheKernel():
            return allocate(*arguments, **options)

    replace(gpu_model_runner, name, allocate_from_the_kernel)


class ZerosFromTheKernel(TorchFunctionMode):
    """In this context, torch.zeros gives large tensors of bytes new pages of the kernel."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        is_known = func is torch.zeros and len(args) == 1 and kwargs.keys() <= {"dtype", "device"}
        if is_known and isinstance(args[0], int) and args[0] >= LEAST_BYTES:
            device = torch.device(kwargs.get("device") or "cpu")
            if kwargs.get("dtype") == torch.int8 and device.type == "cpu":
                return new_pages(args[0])
        return func(*args, **kwargs)


def new_pages(size_bytes: int) -> Tensor:
    """Zeros, int8 [size_bytes], whose pages a thread takes."""
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    found = torch.frombuffer(pages, dtype=torch.int8)
    if cpu_pages.are_allowed():
        cpu_pages.ask([found])
    thread = threading.Thread(target=_take, args=(found,), name="take pages", daemon=True)
    thread.start()
    return found


def _take(memory: Tensor) -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    for begin in range(0, len(memory), _CHUNK_BYTES):
        size = min(_CHUNK_BYTES, len(memory) - begin)
        if not madvise(memory.data_ptr() + begin, size, _POPULATE_WRITE):
            return

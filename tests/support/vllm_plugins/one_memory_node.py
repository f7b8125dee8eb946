"""A vLLM plugin for tests: memory node 0 on a kernel that names no nodes in /proc/self/status.

vLLM 0.32 takes the first of an empty list there (v1/worker/cpu_worker.py:66).
"""

from __future__ import annotations

import functools


@functools.cache
def register() -> None:
    from vllm.utils import cpu_resource_utils

    if not cpu_resource_utils.get_memory_affinity():
        setattr(cpu_resource_utils, "get_memory_affinity", lambda pid=0: [0])  # noqa: B010

"""Engine and worker as one process on vLLM's CPU platform, on the cores that nibble's plan names.

vLLM 0.32's CPU platform always spawns the engine (platforms/cpu.py:400). Where nibble sets "fork",
it stays. A worker in the engine's process has no core bound to it: it gets the cores that the
plan's number of threads was made for.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from vllm.platforms import current_platform

from nibble.engine.plugin.require import replace, required
from nibble.machine.cpus import compute_cores

START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
# vLLM's warnings about what nibble sets on purpose: the plan gives the threads with their reason,
# and the one process of the engine draws its random numbers for requests alone.
_INTENDED = {
    "vllm.utils.torch_utils": "OMP_NUM_THREADS=%s is set",
    "vllm.engine.arg_utils": "The global random seed is set",
}


def compute_in_the_engine() -> None:
    """Follow CpuPlatform.check_and_update_config and CPUWorker."""
    if not current_platform.is_cpu():
        return
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu_worker import CPUWorker

    update = required(CpuPlatform, "check_and_update_config", "vllm_config")
    start = required(CPUWorker, "__init__", "self", "vllm_config", "local_rank", "rank",
                     "distributed_init_method")  # fmt: skip

    def check_and_update_config(vllm_config: Any) -> None:
        chosen = os.environ.get(START_METHOD)
        update(vllm_config)
        if chosen == "fork" and vllm_config.parallel_config.distributed_executor_backend == "uni":
            os.environ[START_METHOD] = chosen

    def __init__(self: Any, vllm_config: Any, *arguments: Any, **options: Any) -> None:
        if vllm_config.parallel_config.distributed_executor_backend == "uni":
            os.sched_setaffinity(0, compute_cores().cpus)
            if threads := os.environ.get("OMP_NUM_THREADS"):
                torch.set_num_threads(int(threads))  # the server computes with one
        start(self, vllm_config, *arguments, **options)

    if os.environ.get(START_METHOD) == "fork":
        # GNU OpenMP's threads do not survive a fork: if the server computed with several, the
        # engine's first parallel region would wait for ever.
        torch.set_num_threads(1)
        # vLLM inspects a model's class in a process that imports vLLM again, so that CUDA is not
        # initialized before a fork (vllm 0.32 models/registry.py:1079). Here the engine inherits
        # what the server imports.
        replace(registry, "_run_in_subprocess", lambda fn: fn(), "fn")
        leave_out_intended()
    replace(CpuPlatform, "check_and_update_config", staticmethod(check_and_update_config))
    replace(CPUWorker, "__init__", __init__)


def leave_out_intended() -> None:
    """Keep vLLM's warnings of _INTENDED out of the log."""
    for name, beginning in _INTENDED.items():
        logging.getLogger(name).addFilter(
            lambda record, beginning=beginning: not str(record.msg).startswith(beginning)
        )

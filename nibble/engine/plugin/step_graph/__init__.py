"""Decode steps of which the host only launches CUDA graphs; see docs/step_graph.md.

- qualify.py: which step may, and which sampler it needs. Pure functions.
- facts.py: what vLLM's objects say about that.
- runner.py: the model runner that decides for each step.
- graphs.py, changes.py, output.py: capture and launch; new cache blocks; tokens to the host.
- tables.py: vLLM's tables at fixed addresses.
- probe.py: whether vLLM's code is what the graphs repeat.
- counts.py: the counter on /metrics.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

from nibble.engine.plugin.require import VllmMismatch, names_of_vllm, replace
from nibble.engine.plugin.step_graph.counts import report_metric

logger = init_logger(f"vllm.{__name__}")


def follow_workers() -> None:
    """Give each GPU worker that is created from now on nibble's model runner.

    The runner is imported in the worker alone: the import takes a second.
    """
    report_metric()
    if not current_platform.is_cuda():
        return
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    def with_runner(wrapper: Any) -> None:
        replace_runner()
        create(wrapper)

    create = replace(WorkerWrapperBase, "init_device", with_runner, "self")


@functools.cache
def replace_runner() -> None:
    """Replace vLLM's V2 model runner. One line in the log if vLLM's code differs."""
    try:
        with names_of_vllm():
            from vllm.v1.worker.gpu import model_runner

            from nibble.engine.plugin.step_graph.probe import check_source
            from nibble.engine.plugin.step_graph.runner import StepGraphRunner
        check_source()
        replace(model_runner, "GPUModelRunner", StepGraphRunner, "vllm_config", "device")
    except VllmMismatch as mismatch:
        logger.warning("Decode steps take vLLM's path: %s", mismatch)

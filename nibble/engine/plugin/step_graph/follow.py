"""Gives vLLM's workers nibble's model runner, and its schedulers shorter bookkeeping."""

from __future__ import annotations

import functools
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

from nibble.engine.contract import Options
from nibble.engine.plugin.require import VllmMismatch, names_of_vllm, replace
from nibble.engine.plugin.step_graph.counts import report_metric

logger = init_logger(f"vllm.{__name__}")


def follow_workers() -> None:
    """Give each GPU worker that is created from now on nibble's model runner.

    The runner is imported in the worker alone: the import takes a second.
    """
    report_metric()
    _follow_scheduler()
    if not current_platform.is_cuda():
        return
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    def with_runner(wrapper: Any) -> None:
        replace_runner()
        create(wrapper)

    create = replace(WorkerWrapperBase, "init_device", with_runner, "self")


def _follow_scheduler() -> None:
    """Skip unchanged cache blocks in each scheduler that is created from now on."""
    from vllm.v1.core.sched.scheduler import Scheduler

    def create_shorter(scheduler: Any, *arguments: Any, **options: Any) -> None:
        create(scheduler, *arguments, **options)
        if Options.from_config(scheduler.vllm_config.additional_config).step_graph == "on":
            shorten_scheduling(scheduler)

    create = replace(Scheduler, "__init__", create_shorter)


def shorten_scheduling(scheduler: Any) -> None:
    """See cache_slots.py. One line in the log if vLLM's code differs."""
    try:
        with names_of_vllm():
            from nibble.engine.plugin.step_graph.cache_slots import skip_unchanged_blocks
            from nibble.engine.plugin.step_graph.probe import SCHEDULER_SOURCES, check_source
        check_source(SCHEDULER_SOURCES)
        skip_unchanged_blocks(scheduler.kv_cache_manager)
    except VllmMismatch as mismatch:
        logger.warning("Scheduling takes vLLM's path: %s", mismatch)


@functools.cache
def replace_runner() -> None:
    """Replace vLLM's V2 model runner. One line in the log if vLLM's code differs."""
    try:
        with names_of_vllm():
            from vllm.v1.worker.gpu import model_runner

            from nibble.engine.plugin.step_graph.probe import RUNNER_SOURCES, check_source
            from nibble.engine.plugin.step_graph.runner import StepGraphRunner
        check_source(RUNNER_SOURCES)
        replace(model_runner, "GPUModelRunner", StepGraphRunner, "vllm_config", "device")
    except VllmMismatch as mismatch:
        logger.warning("Decode steps take vLLM's path: %s", mismatch)

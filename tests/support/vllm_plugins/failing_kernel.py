"""A vLLM plugin for tests: each sampler graph has a kernel more, which writes beyond all memory
once the file `fail` is in FAILING_FOLDER. No part of nibble.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.support.vllm_plugins.install import install

FOLDER = "FAILING_FOLDER"


def install_failing(folder: Path) -> dict[str, str]:
    """The variables of a server with this plugin, which looks for `fail` in `folder`."""
    return {**install(folder, sys.modules[__name__]), FOLDER: str(folder)}


def register() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    execute, folder, state = WorkerWrapperBase.execute_model, Path(os.environ[FOLDER]), {}

    def execute_and_fail(wrapper: Any, *args: Any, **more: Any) -> Any:
        if not state:
            state["offset"] = _add_kernel()
        if (folder / "fail").exists():
            state["offset"].fill_(1 << 40)
        return execute(wrapper, *args, **more)

    setattr(WorkerWrapperBase, "execute_model", execute_and_fail)  # noqa: B010


def _add_kernel() -> Any:
    """The device's number that says where the kernel writes."""
    import torch
    from vllm.triton_utils import tl, triton

    from nibble.engine.plugin.step_graph.graphs import StepGraphs

    globals()["tl"] = tl

    @triton.jit
    def beyond_all_memory(target, offset):
        tl.store(target + tl.load(offset), 1)

    target = torch.zeros(1, dtype=torch.int32, device="cuda")
    offset = torch.zeros(1, dtype=torch.int64, device="cuda")
    launcher: Any = beyond_all_memory
    launcher[(1,)](target, offset)  # compiles
    sample = StepGraphs._sample

    def sample_and_write(graphs: Any, size: Any) -> Any:
        launcher[(1,)](target, offset)
        return sample(graphs, size)

    StepGraphs._sample = sample_and_write  # type: ignore[method-assign]
    return offset

"""A vLLM plugin for tests: once the file `hang` is in HANG_FOLDER, the next step of the model
never ends. No part of nibble.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tests.support.vllm_plugins.install import install

FOLDER = "HANG_FOLDER"


def install_hanging(folder: Path) -> dict[str, str]:
    """The variables of a server with this plugin, which looks for `hang` in `folder`."""
    return {**install(folder, sys.modules[__name__]), FOLDER: str(folder)}


def register() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    execute, folder = WorkerWrapperBase.execute_model, Path(os.environ[FOLDER])

    def execute_or_hang(*args, **more):
        while (folder / "hang").exists():  # as a GPU that never answers: no CPU time, no end
            time.sleep(1)
        return execute(*args, **more)

    setattr(WorkerWrapperBase, "execute_model", execute_or_hang)  # noqa: B010

"""vLLM's command line in a process whose imports the garbage collector does not look through.

vLLM's server imports some 6,000 modules, among which nothing is garbage. Python's collector would
look through them again and again: a quarter of the imports' processor time, and half a second for
each of vLLM's own collections while it starts. Run as `python -m nibble.engine.start_vllm`, with
the arguments of `vllm`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys

START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_SERVER = ("vllm.entrypoints.cli.serve", "vllm.entrypoints.openai.api_server")
# What an engine imports that is forked from the server, where nibble's plan has "fork". A CPU's
# worker is for a CPU alone: its import replaces torch.cuda's streams (vllm 0.32 worker/cpu/shm.py).
_ENGINE = ("vllm.v1.engine.core", "vllm.v1.worker.gpu_model_runner")
_CPU_ENGINE = ("vllm.v1.worker.cpu_worker", *_ENGINE)


def main() -> None:
    """Run vLLM with this process's arguments."""
    is_forked = os.environ.get(START_METHOD) == "fork"
    if is_forked and "ray" not in sys.argv:
        # vLLM imports Ray where it is installed, and goes without where it is not.
        sys.modules.setdefault("ray", None)  # type: ignore[arg-type]
    gc.disable()
    _import(_SERVER)
    if is_forked:
        _import(_CPU_ENGINE if _is_cpu() else _ENGINE)
    gc.freeze()
    gc.enable()
    importlib.import_module("vllm.entrypoints.cli.main").main()


def _import(names: tuple[str, ...]) -> None:
    for name in names:
        with contextlib.suppress(ImportError):  # what needs it imports it again, and reports
            importlib.import_module(name)


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


if __name__ == "__main__":
    main()

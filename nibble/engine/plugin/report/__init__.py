"""Reports of the workers before they serve: the kernels they use, and comparisons of their layers
with reference code.

This is a separate vLLM plugin (entry point `nibble_proof`). It is active only if NIBBLE_PROOF,
which nibble's supervisor sets, names a folder. A warm worker writes `worker-PID.json` into it.
Nothing here ends a worker; the supervisor checks the reports (nibble/canary).
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nibble.engine.contract import REPORT_FOLDER
from nibble.engine.contract.reference import REFERENCES, REFERENCES_PENDING, Format
from nibble.engine.contract.report import (
    Comparison,
    LayerCheck,
    NotCompared,
    WorkerReport,
    formats_of,
    worker_report,
)
from nibble.engine.plugin import has_operators
from nibble.engine.plugin.require import names_of_vllm, replace, required, required_of_instances

__all__ = ["make_report", "register"]

WARM_UP = "compile_or_warm_up_model"  # the method that vLLM's executors call in every worker
# Longer than the supervisor's limit for computing a reference (nibble/cli/reference.py).
REFERENCE_WAIT_S = 120.0


@functools.cache
def register() -> None:
    """Replace vLLM's functions for the end of the load and for the warm-up in this process.

    Raises VllmMismatch.
    """
    if not os.environ.get(REPORT_FOLDER) or not has_operators():
        return
    with names_of_vllm():
        from vllm.model_executor.model_loader import base_loader
        from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

        from nibble.engine.plugin.report.probes import PROBES

    name = "process_weights_after_loading"  # a name in that module's namespace
    process = required(base_loader, name, "model", "model_config", "target_device")
    required(WorkerBase, WARM_UP, "self")
    required_of_instances(WorkerWrapperBase, "worker", "__getattr__")

    @functools.wraps(process)
    def remember_and_process(model: Any, model_config: Any, target_device: Any) -> None:
        PROBES.remember(model)
        process(model, model_config, target_device)

    def warm_up_and_report(wrapper: WorkerWrapperBase) -> Any:
        times = getattr(wrapper.worker, WARM_UP)()
        write_report(wrapper.worker, Path(os.environ[REPORT_FOLDER]))
        PROBES.forget()
        return times

    # At vllm 0.32 base_loader.py:109 the weights still have the layout of the checkpoint.
    # Executors call methods of the wrapper, which passes those that it does not define on to the
    # worker (worker_base.py:352).
    replace(base_loader, name, remember_and_process)
    setattr(WorkerWrapperBase, WARM_UP, warm_up_and_report)


def make_report(worker: Any) -> WorkerReport:
    """The worker's report; see contract.report.WorkerReport."""
    from nibble.engine.plugin.report.kernels_used import what_ran
    from nibble.engine.plugin.report.layer_checks import run_checks

    began = time.monotonic()
    report: WorkerReport = {
        "rank": worker.rank,
        "ran": None,
        "checks": [],
        "definition": None,
        "problem": "",
        "seconds": 0.0,
    }
    try:
        report["ran"] = what_ran(worker)
        report["checks"] = run_checks(worker)
        report["definition"] = against_definition(worker, report["checks"])
    except Exception as error:  # a model that this code does not know must not end a start
        report["problem"] = f"{type(error).__name__}: {error}"
    report["seconds"] = round(time.monotonic() - began, 3)
    return report


def against_definition(
    worker: Any, checks: Sequence[LayerCheck]
) -> Comparison | NotCompared | None:
    """The comparison with the computed reference for the format of activations that is served.

    `not_compared` with the reason if it fails; None without a reference.
    """
    folder = Path(os.environ.get(REPORT_FOLDER, ""))
    wait_while(folder / REFERENCES_PENDING)
    references = folder / REFERENCES
    if not references.is_file():
        return None
    from nibble.engine.plugin.report.definition import compare_with_definition

    served: Format = "fp4" if "fp4" in formats_of(checks) else "bf16"
    file = json.loads(references.read_text()).get(served)
    if file is None:
        return None
    try:
        return compare_with_definition(worker, Path(file))
    except Exception as error:  # a model that this code cannot follow must not end a start
        known = type(error).__name__ == "Unknown"
        why = str(error) if known else f"{type(error).__name__}: {error}"
        return {"not_compared": " ".join(why.split())[:200]}


def wait_while(pending: Path) -> None:
    """Wait for a reference that is still being computed: the supervisor then removes `pending`."""
    end = time.monotonic() + REFERENCE_WAIT_S
    while pending.exists() and time.monotonic() < end:
        time.sleep(0.05)


def write_report(worker: Any, folder: Path) -> None:
    """Write the worker's report atomically. Warns if the folder is missing, as on another machine,
    or not writable.
    """
    from vllm.logger import init_logger

    logger = init_logger(f"vllm.{__name__}")
    if not folder.is_dir():
        logger.warning("no report of what ran: %s is not on this machine", folder)
        return
    text = json.dumps(make_report(worker))
    scratch = folder / f".worker-{os.getpid()}"
    try:
        scratch.write_text(text)
        scratch.replace(folder / worker_report(os.getpid()))
    except OSError as error:
        logger.warning("no report of what ran: %s cannot be written (%s)", folder, error.strerror)

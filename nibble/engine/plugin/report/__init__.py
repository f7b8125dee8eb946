"""What each worker proves about itself before it serves: which kernels it took, and that they
compute what they should.

A separate vLLM plugin (entry point `nibble_proof`). It does something only where NIBBLE_PROOF
names a folder, as nibble's supervisor has it: once a worker is warm, the folder has its report,
`worker-PID.json`. Nothing here ends a worker; the supervisor judges the reports.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nibble.engine.contract import (
    REFERENCES,
    REFERENCES_PENDING,
    REPORT_FOLDER,
    Comparison,
    Format,
    LayerCheck,
    NotCompared,
    WorkerReport,
    formats_of,
    worker_report,
)
from nibble.engine.plugin import has_operators
from nibble.engine.plugin.require import names_of_vllm, replace, required, required_of_instances

__all__ = ["make_report", "register"]

WARM_UP = "compile_or_warm_up_model"  # as vLLM's executors call it in every worker
REFERENCE_WAIT_S = (
    120.0  # longer than the supervisor lets a reference take (nibble/cli/reference.py)
)


@functools.cache
def register() -> None:
    """Follow weight loading and the end of the warm-up in this process."""
    if not os.environ.get(REPORT_FOLDER) or not has_operators():
        return
    with names_of_vllm():
        from vllm.model_executor.model_loader import base_loader
        from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

        from nibble.engine.plugin.report.probes import PROBES

    name = "process_weights_after_loading"  # which that module imports for itself
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

    # vllm 0.32 base_loader.py:109 is the moment when weights are as the checkpoint has them.
    # Executors call the wrapper's methods, which hands on those it does not have itself
    # (worker_base.py:352).
    replace(base_loader, name, remember_and_process)
    setattr(WorkerWrapperBase, WARM_UP, warm_up_and_report)


def make_report(worker: Any) -> WorkerReport:
    """What ran and what was compared, as plain data."""
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
    """The comparison with a computed reference, or `not_compared` with the reason; None where none
    was handed over.

    REFERENCES has files by the activations that they were computed with: fp4 or bf16.
    """
    folder = Path(os.environ.get(REPORT_FOLDER, ""))
    wait_while(folder / REFERENCES_PENDING)
    place = folder / REFERENCES
    if not place.is_file():
        return None
    from nibble.engine.plugin.report.definition import compare_with_definition

    served: Format = "fp4" if "fp4" in formats_of(checks) else "bf16"
    file = json.loads(place.read_text()).get(served)
    if file is None:
        return None
    try:
        return compare_with_definition(worker, Path(file))
    except Exception as error:  # a model that this code cannot follow must not end a start
        known = type(error).__name__ == "Unknown"
        why = str(error) if known else f"{type(error).__name__}: {error}"
        return {"not_compared": " ".join(why.split())[:200]}


def wait_while(pending: Path) -> None:
    """A reference may still be computed; the supervisor takes `pending` away when it is done."""
    end = time.monotonic() + REFERENCE_WAIT_S
    while pending.exists() and time.monotonic() < end:
        time.sleep(0.05)


def write_report(worker: Any, folder: Path) -> None:
    """The worker's report, all of it or nothing. A worker on another machine has no such folder; it
    says so and goes on.
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

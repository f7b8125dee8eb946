"""Reports the progress of each vLLM process to the hang watch of nibble's supervisor.

Each process writes a few bytes into a file (contract.pulse.PulseRecord). This happens only if
NIBBLE_PULSE names a folder on this machine. The engine core writes before and after each step and
each request of its loop (a few microseconds each); the API server writes when it passes a request
on and when it receives answers. SIGUSR2 makes a process write the Python stacks of all threads into
`stacks-PID`. faulthandler does that without the interpreter's lock, so it works even if a thread
hangs in the driver. nibble/engine/pulse.py reads the files.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import mmap
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

from nibble.engine.contract import PULSE_FOLDER
from nibble.engine.contract.pulse import (
    CALL,
    HEALTH,
    IDLE,
    PULSE_BYTES,
    STACKS_SIGNAL,
    STEP,
    PulseRecord,
    pulse_file,
    stacks_file,
)
from nibble.engine.plugin.require import names_of_vllm, replace, required, required_of_instances

__all__ = ["Pulse", "register"]

_CORE = "vllm.v1.engine.core"
# vLLM runs this module as a short-lived process that inspects a model class.
_INSPECTION = "vllm.model_executor.models.registry"


class Pulse:
    """The pulse file of a process: set the fields of a PulseRecord, then call `write`."""

    def __init__(self, path: Path) -> None:
        self.doing, self.paused, self.turns, self.requests, self.tokens = IDLE, False, 0, 0, 0
        descriptor = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            os.ftruncate(descriptor, PULSE_BYTES)
            self._mapped = mmap.mmap(descriptor, PULSE_BYTES)
        finally:
            os.close(descriptor)
        self.write()

    def write(self) -> None:
        """Write all fields to the file."""
        PulseRecord(
            os.getpid(), self.doing, self.paused, self.turns, self.requests, self.tokens
        ).write(self._mapped)


@functools.cache
def register() -> None:
    """Write pulses in this process, if it is an engine core or an API server.

    Raises VllmMismatch.
    """
    folder = Path(os.environ.get(PULSE_FOLDER, "/nonexistent"))
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if not folder.is_dir() or getattr(main, "name", "") == _INSPECTION:
        return
    _arm(folder)
    # A worker process has neither a core nor an API; the API server always imports the core.
    if _CORE in sys.modules or multiprocessing.parent_process() is None:
        with names_of_vllm():
            _follow_core(folder)
            _follow_api(folder)


def _arm(folder: Path) -> None:
    """Make SIGUSR2 write the stacks. A forked engine core calls this again, for a separate file."""
    with contextlib.suppress(OSError, ValueError):
        file = (folder / stacks_file(os.getpid())).open("w")  # open as long as the process lives
        faulthandler.register(STACKS_SIGNAL, file, all_threads=True, chain=False)


def _follow_core(folder: Path) -> None:
    """The loop of the engine core (vllm 0.32 v1/engine/core.py:1547)."""
    from vllm.v1.core.sched.interface import SchedulerInterface
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    step = required(EngineCoreProc, "_process_engine_step", "self")
    handle = required(EngineCoreProc, "_handle_client_request", "self", "request_type", "request")
    detail = required(EngineCore, "log_error_detail", "self", "scheduler_output")
    required(EngineCore, "is_sleeping", "self")
    required(EngineCoreRequestType, "UTILITY")
    required_of_instances(EngineCore, "scheduler")
    required(SchedulerInterface, "get_num_unfinished_requests", "self")
    required_of_instances(SchedulerOutput, "total_num_scheduled_tokens")
    pulses: dict[int, Pulse] = {}

    def own() -> Pulse:
        """The pulse of this process. vLLM loads plugins when it creates the core, or earlier, in
        the server from which the core is forked.
        """
        if (pulse := pulses.get(os.getpid())) is None:
            _arm(folder)
            pulses.clear()
            pulse = pulses[os.getpid()] = Pulse(folder / pulse_file("engine", os.getpid()))
        return pulse

    def turn(core: Any, doing: int, work: Any) -> Any:
        pulse = own()
        pulse.doing = doing
        pulse.write()
        try:
            return work()
        finally:
            pulse.doing, pulse.tokens = IDLE, 0
            pulse.turns += 1
            pulse.requests = core.scheduler.get_num_unfinished_requests()
            if doing != STEP:
                pulse.paused = bool(core.is_sleeping())
            pulse.write()

    def followed_step(core: Any) -> bool:
        return turn(core, STEP, lambda: step(core))

    def followed_request(core: Any, kind: Any, request: Any) -> None:
        doing = CALL if kind == EngineCoreRequestType.UTILITY else IDLE
        return turn(core, doing, lambda: handle(core, kind, request))

    def with_batch_size(core: Any, scheduler_output: Any) -> Any:
        pulse = own()
        # Batches in flight run one after the other, so the larger one determines the longest step.
        pulse.tokens = max(pulse.tokens, scheduler_output.total_num_scheduled_tokens)
        pulse.write()
        return detail(core, scheduler_output)

    replace(EngineCoreProc, "_process_engine_step", followed_step)
    replace(EngineCoreProc, "_handle_client_request", followed_request)
    # vLLM enters this context manager for each batch that it waits for.
    replace(EngineCore, "log_error_detail", with_batch_size)


def _follow_api(folder: Path) -> None:
    """Count the requests that the API server waits for (vllm 0.32
    v1/engine/output_processor.py:519).
    """
    from vllm.v1.engine.output_processor import OutputProcessor

    begin = required(OutputProcessor, "__init__")
    required_of_instances(OutputProcessor, "request_states")
    pulses: list[Pulse] = []

    def begin_with_pulse(processor: Any, *args: Any, **more: Any) -> None:
        begin(processor, *args, **more)
        pulses[:] = [Pulse(folder / pulse_file("api", os.getpid()))]
        logging.getLogger("uvicorn.access").addFilter(_is_users)

    def count_after(name: str) -> None:
        method = required(OutputProcessor, name)

        @functools.wraps(method)
        def with_count(processor: Any, *args: Any, **more: Any) -> Any:
            try:
                return method(processor, *args, **more)
            finally:
                for pulse in pulses:
                    pulse.requests = len(processor.request_states)
                    pulse.turns += 1
                    pulse.write()

        replace(OutputProcessor, name, with_count)

    replace(OutputProcessor, "__init__", begin_with_pulse)
    for name in ("add_request", "abort_requests", "process_outputs"):
        count_after(name)


def _is_users(record: logging.LogRecord) -> bool:
    """Whether a line of the access log is for a user's request, not for the supervisor's.

    Its arguments are client, method and path (uvicorn 0.54 protocols/http).
    """
    args = record.args
    return not (isinstance(args, tuple) and len(args) > 2 and args[2] == HEALTH)

"""What a hanging process does: Python stacks if it has nibble's plugin, else /proc's facts."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

from nibble.engine.contract.pulse import STACKS_SIGNAL, stacks_file

WAIT_S = 2.0
_POLL_S = 0.05
_LONGEST_CHARACTERS = 20_000  # of one process: some have a hundred threads
_KERNEL = ("wchan", "stack", "syscall")  # the last two need privileges on most machines


def dump_stacks(folder: Path, pids: Collection[int], wake: bool = False) -> dict[int, str]:
    """The text for each process. `wake` continues a stopped process so that it can write its
    stacks.
    """
    sizes = {pid: _size(folder, pid) for pid in pids}
    asked = [pid for pid in pids if _handles_signal(pid) and _send(pid, wake)]
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and any(_size(folder, pid) == sizes[pid] for pid in asked):
        time.sleep(_POLL_S)
    time.sleep(_POLL_S)  # the last one may still write
    return {pid: f"{_python_stacks(folder, pid, sizes[pid])}{_kernel_state(pid)}" for pid in pids}


def _send(pid: int, wake: bool) -> bool:
    try:
        os.kill(pid, STACKS_SIGNAL)
        if wake:
            os.kill(pid, signal.SIGCONT)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _handles_signal(pid: int) -> bool:
    """Whether the process handles the signal instead of dying from it: SigCgt in proc(5)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1)
    return False


def _size(folder: Path, pid: int) -> int:
    try:
        return (folder / stacks_file(pid)).stat().st_size
    except OSError:
        return 0


def _python_stacks(folder: Path, pid: int, offset: int) -> str:
    try:
        with (folder / stacks_file(pid)).open(errors="replace") as file:
            file.seek(offset)
            return file.read(_LONGEST_CHARACTERS)
    except OSError:
        return ""


def _kernel_state(pid: int) -> str:
    """State, and the kernel function it waits in, if this user may read it."""
    found = []
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        found += [
            line.replace("\t", " ") for line in lines if line.startswith(("State:", "Threads:"))
        ]
    for name in _KERNEL:
        with contextlib.suppress(OSError):
            if text := Path(f"/proc/{pid}/{name}").read_text().strip():
                found.append(f"{name}: {text}")
    return "\n".join(found)

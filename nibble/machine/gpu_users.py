"""Who uses the GPUs already, from NVML: processes, memory and load before a trial or a start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nibble.machine.gpu_state import BUSY_PERCENT

# A driver and a desktop take some hundred MiB.
MUCH_BYTES = 1 << 30


@dataclass(frozen=True)
class GpuUse:
    """The use of one GPU; None for what NVML does not report, as on unified memory."""

    index: int
    processes: int | None
    used_bytes: int | None
    busy_percent: int | None


def gpu_uses(indices: Iterable[int]) -> list[GpuUse]:
    """GPUs by their NVML index; none if the driver does not answer."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_use(pynvml, index) for index in indices]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _use(nvml: Any, index: int) -> GpuUse:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(name: str) -> Any:
        try:
            return getattr(nvml, name)(handle)
        except nvml.NVMLError:
            return None

    processes = ask("nvmlDeviceGetComputeRunningProcesses")
    memory, rates = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetUtilizationRates")
    return GpuUse(
        index,
        None if processes is None else len(processes),
        None if memory is None else int(memory.used),
        None if rates is None else int(rates.gpu),
    )


def in_use(use: GpuUse) -> str:
    """`GPU 0 is in use: 2 processes, 12.3 GiB, 97 % busy`, or nothing. Pure."""
    parts: list[str] = []
    if use.processes:
        parts.append(f"{use.processes} process{'es' * (use.processes != 1)}")
    if (use.used_bytes or 0) >= MUCH_BYTES:
        parts.append(f"{(use.used_bytes or 0) / (1 << 30):.1f} GiB")
    if (use.busy_percent or 0) >= BUSY_PERCENT:
        parts.append(f"{use.busy_percent} % busy")
    return f"GPU {use.index} is in use: {', '.join(parts)}" if parts else ""

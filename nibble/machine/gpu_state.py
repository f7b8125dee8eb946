"""Clocks, power, temperature and errors of the GPUs from NVML, without a CUDA context."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# nvml.h nvmlClocksEventReason*: faults of a server. Idle, application clocks, a power cap and sync
# boost are ordinary.
ALARMING = {
    0x8: "hardware slowdown (heat or power)",
    0x20: "thermal slowdown by the driver",
    0x40: "thermal slowdown by the hardware",
    0x80: "power brake by the power supply",
}
BUSY_PERCENT = 50
REPORT_S = 5.0
MAX_XIDS = 16


@dataclass(frozen=True)
class GpuState:
    """One GPU; None for what NVML does not report. `performance_state` is 0 (fastest) to 15."""

    index: int
    performance_state: int | None
    sm_mhz: int | None
    max_sm_mhz: int | None
    watts: float | None
    limit_watts: float | None
    celsius: int | None
    busy_percent: int | None
    throttled_by: int


def gpu_states(indices: Iterable[int]) -> list[GpuState]:
    """GPUs by their NVML index, without lost ones; none if the driver does not answer."""
    return [found for found in _look(indices) if isinstance(found, GpuState)]


def _look(indices: Iterable[int]) -> list[GpuState | str]:
    """Each GPU's state, or NVML's error (`GPU 3: GPU is lost`)."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    found: list[GpuState | str] = []
    try:
        for index in indices:
            try:
                found.append(_state(pynvml, index))
            except pynvml.NVMLError as error:
                found.append(f"GPU {index}: {error}")
    finally:
        pynvml.nvmlShutdown()
    return found


class XidLog:
    """Xid errors of GPUs from now on, from NVML; none if the driver does not answer."""

    def __init__(self, indices: Iterable[int]) -> None:
        self._nvml: Any = None
        self._names: dict[str, int] = {}
        import pynvml

        try:
            pynvml.nvmlInit()
            self._events = pynvml.nvmlEventSetCreate()
            for index in indices:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                pynvml.nvmlDeviceRegisterEvents(
                    handle, pynvml.nvmlEventTypeXidCriticalError, self._events
                )
                self._names[pynvml.nvmlDeviceGetUUID(handle)] = index
        except pynvml.NVMLError:
            return
        self._nvml = pynvml

    def read(self) -> list[str]:
        """New errors since the last call, as `GPU 0: Xid 79`."""
        found: list[str] = []
        while self._nvml is not None and len(found) < MAX_XIDS:
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
                index = self._names.get(self._nvml.nvmlDeviceGetUUID(event.device), "?")
            except self._nvml.NVMLError:  # NVML_ERROR_TIMEOUT: no more
                break
            found.append(f"GPU {index}: Xid {event.eventData}")
        return found


def gpu_report(indices: Sequence[int], xids: XidLog | None) -> list[str]:
    """NVML's report of each GPU, and its Xid errors. A driver that hangs gets REPORT_S seconds."""
    found: list[str] = []

    def ask() -> None:
        found.extend(xids.read() if xids else ())
        states = _look(indices)
        found.extend(state if isinstance(state, str) else describe(state) for state in states)
        if not states:
            found.append("NVML does not report the state of the GPUs")

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(REPORT_S)
    return [*found, f"NVML did not answer within {REPORT_S:.0f} s"] if asking.is_alive() else found


def _state(nvml: Any, index: int) -> GpuState:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(name: str, *more: Any) -> Any:
        try:
            return getattr(nvml, name)(handle, *more)
        except nvml.NVMLError:  # "Not Supported", often on GB10
            return None

    power, limit = ask("nvmlDeviceGetPowerUsage"), ask("nvmlDeviceGetEnforcedPowerLimit")
    rates = ask("nvmlDeviceGetUtilizationRates")
    return GpuState(
        index,
        ask("nvmlDeviceGetPerformanceState"),
        ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        None if power is None else power / 1000,
        None if limit is None else limit / 1000,
        ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        None if rates is None else int(rates.gpu),
        ask("nvmlDeviceGetCurrentClocksEventReasons") or 0,
    )


def describe(state: GpuState) -> str:
    """`GPU 0: P0, 1980 of 1980 MHz, 120 of 700 W, 40 C`."""
    parts = [f"P{state.performance_state}"] if state.performance_state is not None else []
    if state.sm_mhz is not None:
        parts.append(f"{state.sm_mhz} of {state.max_sm_mhz or '?'} MHz")
    if state.watts is not None:
        parts.append(f"{state.watts:.0f} of {state.limit_watts or 0:.0f} W")
    parts += [f"{state.celsius} C"] if state.celsius is not None else []
    return f"GPU {state.index}: {', '.join(parts) or 'NVML reports nothing'}"


def problem(state: GpuState) -> tuple[str, str] | None:
    """What is wrong with a GPU's clocks and its fix, or None. Pure."""
    if reasons := [text for bit, text in ALARMING.items() if state.throttled_by & bit]:
        return f"slowed down: {', '.join(reasons)}", "check cooling, power supply and cables"
    slow = state.performance_state is not None and state.performance_state >= 5
    if slow and (state.busy_percent or 0) >= BUSY_PERCENT:
        what = f"busy ({state.busy_percent} %) but in low-power state P{state.performance_state}"
        return what, "restart the machine: a GPU can stay in this state after a crash"
    return None

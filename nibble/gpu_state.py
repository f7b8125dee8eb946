"""Clocks, power and temperature of the GPUs as NVML tells them now; no CUDA context."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# nvml.h nvmlClocksEventReason*: what a server should never see for long. Idle, the application's own clocks, a power cap
# and sync boost are ordinary.
ALARMING = {
    0x8: "hardware slowdown (heat or power)",
    0x20: "thermal slowdown by the driver",
    0x40: "thermal slowdown by the hardware",
    0x80: "power brake: the supply asks for less",
}
BUSY_PERCENT = 50


@dataclass(frozen=True)
class GpuState:
    """One GPU; None where NVML does not say. `performance_state` is 0 (fastest) to 15."""

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
    """GPUs by their NVML index; none where the driver does not answer."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_state(pynvml, index) for index in indices]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


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
    return f"GPU {state.index}: {', '.join(parts) or 'NVML does not say'}"


def problem(state: GpuState) -> tuple[str, str] | None:
    """What is wrong with a GPU's clocks and what mends it, or None. Pure."""
    if reasons := [text for bit, text in ALARMING.items() if state.throttled_by & bit]:
        return f"slowed down: {', '.join(reasons)}", "check cooling, power supply and cables"
    slow = state.performance_state is not None and state.performance_state >= 5
    if slow and (state.busy_percent or 0) >= BUSY_PERCENT:
        what = f"busy ({state.busy_percent} %) and still in low-power state P{state.performance_state}"
        return what, "a GPU can stay there after a crash: restart the machine"
    return None

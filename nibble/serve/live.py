"""What the status page shows and `/metrics` reports: the supervisor's status, traffic and GPUs."""

from __future__ import annotations

import http
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from nibble.engine.api import Api
from nibble.engine.gate.few_metrics import path_for
from nibble.engine.log import PHASES
from nibble.machine.gpu_state import ALARMING, GpuState, gpu_states
from nibble.serve.advice import advise
from nibble.serve.traffic import CACHE_S, NAMES, TrafficReader

_METRICS_TIMEOUT_S, _NVML_TIMEOUT_S = 2.0, 1.0


class GpuReader:
    """NVML's report of GPUs, read at most once in CACHE_S. A driver that hangs holds up no page."""

    def __init__(
        self,
        indices: Sequence[int],
        look: Callable[[Sequence[int]], Sequence[GpuState]] = gpu_states,
    ) -> None:
        self._indices, self._look = indices, look
        self._asking: threading.Thread | None = None
        self._asked_at_s = float("-inf")
        self._found: Sequence[GpuState] = ()

    def read(self) -> Sequence[GpuState]:
        """The last report; none on a CPU."""
        if not self._indices:
            return ()
        is_asking = self._asking is not None and self._asking.is_alive()
        if not is_asking and time.monotonic() - self._asked_at_s >= CACHE_S:
            self._asked_at_s = time.monotonic()
            self._asking = threading.Thread(target=self._ask, name="nvml", daemon=True)
            self._asking.start()
            self._asking.join(_NVML_TIMEOUT_S)
        return self._found

    def _ask(self) -> None:
        self._found = self._look(self._indices)


class Live:
    """Answers /nibble/live and the control port's /metrics. All methods run in request threads."""

    def __init__(
        self,
        status: Callable[[], dict[str, Any]],
        reason: Callable[[], str],
        api: Api,
        gpu_indices: Sequence[int],
        stall_s: float,
        failed_starts: int,
    ) -> None:
        self._status, self._reason, self._api = status, reason, api
        self._traffic = TrafficReader(self._metrics_of_vllm)
        self._gpus = GpuReader(gpu_indices)
        self._stall_s, self._failed_starts = stall_s, failed_starts

    def to_json(self) -> dict[str, Any]:
        """The status without the plan, and traffic, GPUs and problems."""
        status = self._status()
        status["reason"] = self._reason()
        status["failed_starts"] = self._failed_starts
        serves = status["state"] in ("ready", "paused", "draining")
        traffic = self._traffic.read() if serves else None
        gpus = self._gpus.read()
        # The plan changes only with the process; the page reads it once, from /status.
        light = {name: value for name, value in status.items() if name != "plan"}
        return light | {
            "traffic": traffic,
            "gpus": [asdict(gpu) for gpu in gpus],
            "problems": advise(status, traffic, gpus, self._stall_s),
        }

    def metrics(self) -> str:
        """nibble's own metrics in Prometheus's text format."""
        return metrics_text(self._status(), self._failed_starts, self._gpus.read())

    def _metrics_of_vllm(self) -> str | None:
        try:
            status, body = self._api.call(path_for(NAMES), timeout_s=_METRICS_TIMEOUT_S)
            if status != http.HTTPStatus.OK:  # several API processes
                status, body = self._api.call("/metrics", timeout_s=_METRICS_TIMEOUT_S)
        except OSError:
            return None
        return body.decode(errors="replace") if status == 200 else None


def live_without_engine(status: Mapping[str, Any]) -> dict[str, Any]:
    """For the time before vLLM: a download, or the wait of a crash loop."""
    return {**status, "traffic": None, "gpus": [], "problems": advise(status)}


def metrics_text(
    status: Mapping[str, Any], failed_starts: int, gpus: Sequence[GpuState] = ()
) -> str:
    """Gauges of nibble for Prometheus. Verdicts: 1 passed, 0 failed, -1 not compared or off."""
    lines: list[str] = []
    for name, text, values in (
        *_gauges(status, failed_starts),
        *_kernel_gauges(status),
        *_gpu_gauges(gpus),
    ):
        lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
        lines += [f"{name}{labels} {value}" for labels, value in values]
    return "\n".join(lines) + "\n"


Gauge = tuple[str, str, Sequence[tuple[str, float]]]


def _gauges(status: Mapping[str, Any], failed_starts: int) -> Iterator[Gauge]:
    phases = [(f'{{phase="{one}"}}', int(one == status["phase"])) for one in PHASES]
    yield "nibble_phase", "The phase of the start: 1 for the current one.", phases
    ready = int(status["state"] == "ready")
    yield "nibble_ready", "Whether new requests are admitted.", [("", ready)]
    yield from memory_gauges(status)
    for part, text in (("canary", "answers"), ("assertion", "kernels")):
        verdict = status.get(part, {}).get("verdict", "")
        value = {"passed": 1, "failed": 0}.get(verdict, -1)
        about = f"Verdict on {text}: 1 passed, 0 failed, -1 not compared."
        yield f"nibble_{part}_passed", about, [("", value)]
    about = "Starts of this plan that failed in a row before this one."
    yield "nibble_failed_starts", about, [("", failed_starts)]
    uptime = "Seconds since this start began."
    yield "nibble_start_age_seconds", uptime, [("", status.get("seconds_since_start", 0.0))]


def memory_gauges(status: Mapping[str, Any]) -> Iterator[Gauge]:
    """The watchdog's; none where it is off, or belongs to the server of several models."""
    memory = status.get("memory", {})
    if not memory.get("reserve_bytes"):
        return
    paused = int(status["state"] == "paused")
    yield "nibble_watchdog_paused", "Whether short memory stops admission.", [("", paused)]
    if "available_bytes" in memory:
        available = memory["available_bytes"]
        yield "nibble_memory_available_bytes", "Memory that is available.", [("", available)]
        bounds = ("reserve_bytes", "pause_below_bytes", "stop_below_bytes", "resume_from_bytes")
        limits = [(f'{{limit="{one.removesuffix("_bytes")}"}}', memory[one]) for one in bounds]
        yield "nibble_memory_limit_bytes", "Limits of the memory watchdog.", limits


def _kernel_gauges(status: Mapping[str, Any]) -> Iterator[Gauge]:
    """Layers by the kernel that runs them, as the first worker reported."""
    ran = (status.get("assertion", {}).get("ran") or ({},))[0]
    layers = [
        (f'{{part="{part}",kernel="{_label(name)}"}}', count)
        for part in ("linear", "moe", "attention")
        for name, count in ran.get(part, {}).items()
    ]
    if layers:
        yield "nibble_kernel_layers", "Layers that a kernel computes.", layers


def _gpu_gauges(gpus: Sequence[GpuState]) -> Iterator[Gauge]:
    figures = (
        ("celsius", "Temperature."),
        ("watts", "Power."),
        ("sm_mhz", "Clock of the multiprocessors."),
        ("busy_percent", "Share of time with a kernel."),
    )
    for name, about in figures:
        read = [(gpu.index, getattr(gpu, name)) for gpu in gpus]
        values = [(f'{{gpu="{index}"}}', value) for index, value in read if value is not None]
        if values:
            yield f"nibble_gpu_{name}", f"{about} Of a GPU.", values
    if gpus:
        throttled = [
            (f'{{gpu="{gpu.index}"}}', int(any(gpu.throttled_by & bit for bit in ALARMING)))
            for gpu in gpus
        ]
        yield "nibble_gpu_throttled", "Whether heat or power slows a GPU.", throttled


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")

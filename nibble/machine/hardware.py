"""This machine: GPUs through NVML (no CUDA context), memory within the cgroup, CPU features."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nibble.machine.cpus import ComputeCores, compute_cores
from nibble.machine.memory import HOST, memory_now
from nibble.machine.read_bandwidth import stored_bandwidth
from nibble.machine.targets import Target

# Instruction sets that vLLM 0.32 (platforms/cpu.py:639) and oneDNN use, widest first.
_WIDE = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML sees it; `memory_bytes` is None on unified memory."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int | None
    memory_free_bytes: int | None
    uuid: str


@dataclass(frozen=True)
class Hardware:
    """The machine of a plan; `assumed` if described (`--target`, NUM_GPUS) instead of detected.

    `gpus` are those that CUDA_VISIBLE_DEVICES selects; `hidden_gpus` counts the others. `cpu_cores`
    counts logical CPUs; `compute` names the cores for a model on the CPU; `read_bytes_per_s`
    is the largest bandwidth that a start measured on them.
    """

    gpus: tuple[Gpu, ...]
    driver: str | None
    cuda_driver: str | None
    cpu_arch: str
    cpu_cores: int
    cpu_flags: frozenset[str]
    memory_total_bytes: int
    memory_available_bytes: int
    assumed: bool = False
    nvml_error: str | None = None
    memory_limited_by: str = HOST
    hidden_gpus: int = 0
    compute: ComputeCores | None = None
    read_bytes_per_s: float | None = None

    def arithmetic(self, device: str) -> str:
        """The hardware that decides a model's rounding: GPU name or widest CPU instructions."""
        if device == "cuda":
            return self.gpus[0].name if self.gpus else ""
        return next((flag for flag in _WIDE if flag in self.cpu_flags), self.cpu_arch)

    def to_json(self) -> dict[str, Any]:
        """Plain data for --json, with the CPU flags that vLLM's CPU build needs."""
        wanted = {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16", "i8mm"}
        return asdict(self) | {"cpu_flags": sorted(self.cpu_flags & wanted)}


def detect(environ: Mapping[str, str] = os.environ) -> Hardware:
    """Detect this machine. It never fails: unreadable facts are absent or named in `nvml_error`."""
    found, driver, cuda_driver, error = _nvml()
    gpus = visible(found, environ.get("CUDA_VISIBLE_DEVICES"))
    memory, compute = memory_now(), compute_cores()
    return Hardware(
        gpus,
        driver,
        cuda_driver,
        platform.machine(),
        _cpu_cores(),
        _cpu_flags(),
        memory.total_bytes,
        memory.available_bytes,
        nvml_error=error,
        memory_limited_by=memory.limited_by,
        hidden_gpus=len(found) - len(gpus),
        compute=compute,
        read_bytes_per_s=stored_bandwidth(compute, environ),
    )


def assume(target: Target, gpu_count: int, here: Hardware) -> Hardware:
    """Hardware of another target, for `nibble plan --target`: `gpu_count` of its first product."""
    if target.device == "cpu":
        return replace(here, gpus=(), driver=None, cuda_driver=None, nvml_error=None)
    model = target.gpu_models[0]
    gpu = [
        Gpu(i, model.match, target.capabilities[0], model.memory_bytes, None, "")
        for i in range(gpu_count)
    ]
    arch = "aarch64" if target.platforms == ("linux/arm64",) else "x86_64"
    memory = model.memory_bytes if target.memory.kind == "unified" else here.memory_total_bytes
    return Hardware(
        tuple(gpu), None, None, arch, here.cpu_cores, frozenset(), memory, memory, assumed=True
    )


def _nvml() -> tuple[tuple[Gpu, ...], str | None, str | None, str | None]:
    if not (
        Path("/dev/nvidiactl").exists()
        or Path("/dev/dxg").exists()
        or Path("/proc/driver/nvidia").exists()
    ):
        return (), None, None, None  # without a driver, loading NVML costs 20 ms and fails
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), None, None, str(error)
    try:
        gpus = [_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return (
            tuple(gpus),
            _text(pynvml.nvmlSystemGetDriverVersion()),
            f"{cuda // 1000}.{cuda % 1000 // 10}",
            None,
        )
    except pynvml.NVMLError as error:
        return (), None, None, str(error)
    finally:
        pynvml.nvmlShutdown()


def _gpu(pynvml: Any, index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        total, free = int(memory.total), int(memory.free)
    except pynvml.NVMLError:  # GB10: the GPU's memory is the host's, NVML answers "Not Supported"
        total = free = None
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    name, uuid = _text(pynvml.nvmlDeviceGetName(handle)), _text(pynvml.nvmlDeviceGetUUID(handle))
    return Gpu(index, name, (major, minor), total, free, uuid)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def visible(gpus: tuple[Gpu, ...], selection: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES selects, in its order; NVML does not honour it."""
    if selection is None:
        return gpus
    chosen: list[Gpu] = []
    for word in (part.strip() for part in selection.split(",")):
        match = [g for g in gpus if word and (str(g.index) == word or g.uuid.startswith(word))]
        if not match:  # CUDA stops at the first invalid entry
            break
        chosen.append(match[0])
    return tuple(chosen)


def _cpu_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_flags() -> frozenset[str]:
    try:
        match = re.search(
            r"^(?:flags|Features)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
    except OSError:
        return frozenset()
    return frozenset(match[1].split()) if match else frozenset()

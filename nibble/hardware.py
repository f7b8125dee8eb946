"""What is in this machine: GPUs through NVML (no CUDA context), memory within the cgroup, CPU features."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nibble.targets import Target

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML sees it. `memory_bytes` is None where NVML does not say (unified memory)."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int | None
    memory_free_bytes: int | None
    uuid: str


@dataclass(frozen=True)
class Hardware:
    """The machine a plan is made for; `assumed` when it was described (`--target`, NUM_GPUS), not found."""

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

    def to_json(self) -> dict[str, Any]:
        """Plain data for --json; of the CPU flags only those vLLM's CPU build asks for."""
        wanted = {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16", "i8mm"}
        return asdict(self) | {"cpu_flags": sorted(self.cpu_flags & wanted)}


def detect(environ: Mapping[str, str] = os.environ) -> Hardware:
    """Look at this machine. Never fails: what cannot be read is absent or named in `nvml_error`."""
    gpus, driver, cuda_driver, error = _nvml(environ)
    total, available = host_memory()
    return Hardware(
        gpus,
        driver,
        cuda_driver,
        platform.machine(),
        _cpu_cores(),
        _cpu_flags(),
        total,
        available,
        nvml_error=error,
    )


def assume(target: Target, gpu_count: int, here: Hardware) -> Hardware:
    """Hardware of a target that is not here: `gpu_count` of its first product, for `nibble plan --target`."""
    if target.device == "cpu":
        return Hardware((), None, None, here.cpu_arch, here.cpu_cores, here.cpu_flags, here.memory_total_bytes,
                        here.memory_available_bytes)  # fmt: skip
    model = target.gpu_models[0]
    gpu = [
        Gpu(i, model.match, target.capabilities[0], model.memory_bytes, None, "") for i in range(gpu_count)
    ]
    arch = "aarch64" if target.platforms == ("linux/arm64",) else "x86_64"
    memory = model.memory_bytes if target.memory_kind == "unified" else here.memory_total_bytes
    return Hardware(tuple(gpu), None, None, arch, here.cpu_cores, frozenset(), memory, memory, assumed=True)


def _nvml(environ: Mapping[str, str]) -> tuple[tuple[Gpu, ...], str | None, str | None, str | None]:
    if not (
        Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists() or Path("/proc/driver/nvidia").exists()
    ):
        return (), None, None, None  # loading NVML where no driver is costs 20 ms and only says so
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), None, None, str(error)
    try:
        gpus = [_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return (
            visible(tuple(gpus), environ.get("CUDA_VISIBLE_DEVICES")),
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
    """The GPUs CUDA_VISIBLE_DEVICES leaves, in its order; NVML itself does not honour it."""
    if selection is None:
        return gpus
    chosen: list[Gpu] = []
    for word in (part.strip() for part in selection.split(",")):
        match = [g for g in gpus if word and (str(g.index) == word or g.uuid.startswith(word))]
        if not match:  # CUDA stops at the first entry that names no device
            break
        chosen.append(match[0])
    return tuple(chosen)


def host_memory() -> tuple[int, int]:
    """(total, available) bytes of this machine or of its cgroup, whichever is less.

    MemAvailable, not MemFree: the page cache can be taken back (vllm#48140).
    """
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    total, available = int(fields["MemTotal"]) << 10, int(fields["MemAvailable"]) << 10
    limit, used = _cgroup_memory()
    if limit is None:
        return total, available
    return min(total, limit), max(0, min(available, limit - used))


def _cgroup_memory() -> tuple[int | None, int]:
    """(limit, use without reclaimable page cache) of this cgroup, v2 or v1; (None, 0) without a limit."""
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            text = (CGROUP / limit_file).read_text().strip()
            usage = int((CGROUP / usage_file).read_text())
            stat = (CGROUP / limit_file).with_name("memory.stat").read_text()
        except (OSError, ValueError):
            continue
        if text == "max" or int(text) >= 1 << 60:
            return None, 0
        inactive = re.search(r"^(?:total_)?inactive_file (\d+)", stat, re.MULTILINE)
        return int(text), max(0, usage - int(inactive[1] if inactive else 0))
    return None, 0


def _cpu_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_flags() -> frozenset[str]:
    try:
        match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return frozenset()
    return frozenset(match[1].split()) if match else frozenset()

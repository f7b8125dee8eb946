"""GPU targets as data: targets/*.toml, and which of them this machine is.

A target names its compute capabilities, what it builds for, hardware facts that an architecture
number does not determine, default settings with their reasons, and known bad drivers.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from nibble.errors import ExitCode, NibbleError
from nibble.machine.paths import root

MEMORY_SHARES = ("reserve", "engine", "graphs", "workspace")
TARGET_NAMES = ("gb10", "sm120", "b200", "hopper", "cpu")


@dataclass(frozen=True)
class Features:
    """Hardware features. `smem_bytes` is shared memory per thread block, 0 on the CPU."""

    has_fp4_mma: bool
    has_fp4_cvt: bool
    has_fp8_mma: bool
    smem_bytes: int


@dataclass(frozen=True)
class GpuModel:
    """A product of a target: its NVML name, memory and specified bandwidth."""

    match: str
    capability: tuple[int, int]
    memory_bytes: int
    bandwidth_bytes_per_s: float
    sm_count: int
    source: str
    trials: str = ""  # file with the times of nibble's linear kernels on it, which ships


@dataclass(frozen=True)
class Default:
    """A target's default, with reason and evidence for `nibble plan`."""

    value: Any
    reason: str
    evidence: str


@dataclass(frozen=True)
class KnownBad:
    """A version prefix of driver, kernel or package that fails on a target."""

    version: str
    severity: Literal["error", "warning"]
    reason: str
    evidence: str
    component: str = "driver"


@dataclass(frozen=True)
class MemoryFacts:
    """Bytes of one device that a plan reserves or that vLLM takes beside weights and KV cache.

    `engine_bytes` covers vLLM's processes and the CUDA context, `graphs_bytes` the captured CUDA
    graphs, `workspace_bytes` activations and what the kernels allocate.
    """

    kind: Literal["unified", "discrete", "host"]
    reserve_bytes: int
    reserve_reason: str
    engine_bytes: int
    graphs_bytes: int
    workspace_bytes: int
    overhead_reason: str


@dataclass(frozen=True)
class Target:
    """One targets/NAME.toml."""

    name: str
    title: str
    device: Literal["cuda", "cpu"]
    capabilities: tuple[tuple[int, int], ...]
    platforms: tuple[str, ...]
    torch_cuda_arch_list: str
    memory: MemoryFacts
    features: Features
    gpu_models: tuple[GpuModel, ...]
    args: Mapping[str, Default]
    env: Mapping[str, Default]
    known_bad: tuple[KnownBad, ...]
    expected: Mapping[
        str, tuple[str, ...]
    ]  # part of the engine -> kernels, one of which has to run (canary/kernels.py)
    image: Mapping[str, str]

    def gpu_model(self, name: str) -> GpuModel | None:
        """The product that NVML calls `name`; the longest match wins."""
        found = [model for model in self.gpu_models if model.match.lower() in name.lower()]
        return max(found, key=lambda model: len(model.match), default=None)


@cache
def load_target(name: str) -> Target:
    """Read targets/`name`.toml. Raises CONFIG for an unknown name or an unreadable file."""
    if name not in TARGET_NAMES:
        what = f"there is no target {name!r}"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="one of " + ", ".join(TARGET_NAMES),
            action="correct NIBBLE_TARGET or --target",
        )
    try:
        return parse_target(root() / "targets" / f"{name}.toml")
    except OSError as error:
        what = f"{root()}/targets/{name}.toml cannot be read ({error.strerror})"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="a file of nibble's installation",
            action="unset NIBBLE_ROOT, or install nibble again",
        ) from None


def parse_target(path: Path) -> Target:
    """A target file as a value; a KeyError or TypeError means a broken installation."""
    data = tomllib.loads(path.read_text())
    capabilities = tuple(_capability(text) for text in data["capabilities"])
    return Target(
        name=data["name"],
        title=data["title"],
        device=data["device"],
        capabilities=capabilities,
        platforms=tuple(data["platforms"]),
        torch_cuda_arch_list=data["torch_cuda_arch_list"],
        memory=_memory_facts(data["memory"]),
        features=Features(**data["features"]),
        gpu_models=tuple(_gpu_model(entry, capabilities[0]) for entry in data.get("gpu", ())),
        args={"--" + name: Default(**entry) for name, entry in data.get("args", {}).items()},
        env={name: Default(**entry) for name, entry in data.get("env", {}).items()},
        known_bad=tuple(KnownBad(**entry) for entry in data.get("known_bad", ())),
        expected={part: tuple(names) for part, names in data.get("expected", {}).items()},
        image=data["image"],
    )


def _capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def _memory_facts(entry: Mapping[str, Any]) -> MemoryFacts:
    sizes = {f"{name}_bytes": int(entry[f"{name}_gib"] * (1 << 30)) for name in MEMORY_SHARES}
    texts = {name: entry[name] for name in ("kind", "reserve_reason", "overhead_reason")}
    return MemoryFacts(**sizes, **texts)


def _gpu_model(entry: Mapping[str, Any], usual: tuple[int, int]) -> GpuModel:
    return GpuModel(
        match=entry["match"],
        capability=_capability(entry["capability"]) if "capability" in entry else usual,
        memory_bytes=int(entry["memory_gib"] * (1 << 30)),
        bandwidth_bytes_per_s=entry["bandwidth_gb_s"] * 1e9,
        sm_count=entry["sm_count"],
        source=entry["source"],
        trials=entry.get("trials", ""),
    )


def target_for_capability(capability: tuple[int, int]) -> Target | None:
    """The target that covers a compute capability, e.g. (12, 1) -> gb10."""
    for name in TARGET_NAMES:
        target = load_target(name)
        if capability in target.capabilities:
            return target
    return None

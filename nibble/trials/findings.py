"""What about a machine makes a self-test's results worth less, or a server impossible. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nibble.machine.gpu_state import GpuState, problem
from nibble.machine.gpu_users import GpuUse, in_use
from nibble.machine.hardware import Hardware
from nibble.machine.targets import Target, target_for_capability


@dataclass(frozen=True)
class Finding:
    """`blocks`: no server of nibble's runs here until that is fixed."""

    what: str
    fix: str
    blocks: bool = False

    def line(self) -> str:
        return f"{self.what}; {self.fix}"


def unknown_gpus(hardware: Hardware) -> list[Finding]:
    """GPUs that no target covers."""
    unknown = {
        f"{gpu.name} (compute capability {gpu.capability[0]}.{gpu.capability[1]})"
        for gpu in hardware.gpus
        if target_for_capability(gpu.capability) is None
    }
    fix = "nibble serves on it as on the CPU only: set NIBBLE_TARGET=cpu"
    return [
        Finding(f"{name} is a GPU that nibble does not know", fix, True) for name in sorted(unknown)
    ]


def driver_too_old(hardware: Hardware, torch_cuda: str) -> list[Finding]:
    """A driver for an older major version of CUDA than torch's: no kernel would start."""
    if not hardware.gpus or not torch_cuda or not hardware.cuda_driver:
        return []
    if _major(hardware.cuda_driver) >= _major(torch_cuda):
        return []
    what = (
        f"driver {hardware.driver} is for CUDA {hardware.cuda_driver}, and torch is built for CUDA"
        f" {torch_cuda}"
    )
    return [Finding(what, f"install a driver for CUDA {_major(torch_cuda)} or later", True)]


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def known_bad_driver(target: Target, driver: str | None) -> list[Finding]:
    """A driver that the target's file names."""
    return [
        Finding(
            f"driver {driver} on {target.name}: {bad.reason} ({bad.evidence})",
            "install another driver",
            bad.severity == "error",
        )
        for bad in target.known_bad
        if bad.component == "driver" and driver and driver.startswith(bad.version)
    ]


def not_idle(uses: Iterable[GpuUse]) -> list[Finding]:
    """GPUs that other programs use: times and free memory are not the machine's."""
    fix = "end the other program for times that hold"
    return [Finding(text, fix) for use in uses if (text := in_use(use))]


def slowed_down(states: Sequence[GpuState]) -> list[Finding]:
    """GPUs that heat, power or a crash slow down."""
    found = ((state.index, problem(state)) for state in states)
    return [Finding(f"GPU {index} is {why[0]}", why[1]) for index, why in found if why]

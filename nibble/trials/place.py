"""The machine and the build that results hold for."""

from __future__ import annotations

from nibble.engine.installed import build_id, build_parts, compiled_id
from nibble.machine.hardware import Hardware
from nibble.machine.read_bandwidth import processor_line
from nibble.machine.targets import Target
from nibble.trials.report import Place


def place_of(target: Target, hardware: Hardware, *, compiled: str = "") -> Place:
    """With every digest of the build; `compiled`, where it is known, is enough for a record."""
    on_gpu = target.device == "cuda" and bool(hardware.gpus)
    device = hardware.gpus[0].name if on_gpu else processor_line().partition(":")[2].strip()
    return Place(
        target.name,
        device or hardware.cpu_arch,
        len(hardware.gpus) if on_gpu else 0,
        (hardware.driver or "") if on_gpu else "",
        (hardware.cuda_driver or "") if on_gpu else "",
        compiled or compiled_id(),
        "" if compiled else build_id(),
        {} if compiled else build_parts(),
    )

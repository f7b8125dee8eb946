"""Tuned Triton MoE configurations for a GPU without its own: the nearest sibling's.

vLLM 0.32 looks a file up by the GPU's exact product name (fused_moe.py:1089-1103), first in
VLLM_TUNED_CONFIG_FOLDER (fused_moe.py:1135). Its wheel has some for RTX PRO 6000 Server and
Workstation and none for Max-Q and RTX 5090. nibble makes a folder of links under this GPU's name
and names it in that variable. Only experts that run in Triton read such files: BF16, FP8 and INT8
ones. NVFP4 experts run in CUTLASS, FlashInfer, b12x or Marlin, which read none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nibble.checkpoint import Checkpoint
from nibble.machine.hardware import Hardware
from nibble.machine.targets import GpuModel, Target

VARIABLE = "VLLM_TUNED_CONFIG_FOLDER"
_DEVICE = re.compile(r"(?<=,device_name=).+?(?=,dtype=|,block_shape=|\.json$)")


@dataclass(frozen=True)
class TunedConfigs:
    """The files an installed vLLM has: `folder` and the names in it."""

    folder: Path
    names: tuple[str, ...]


@dataclass(frozen=True)
class Alias:
    """A folder to make: `links` maps a name with this GPU in it to a file of `configs`."""

    configs: Path
    links: Mapping[str, str]
    folder: Path
    reason: str


def installed_configs() -> TunedConfigs | None:
    """The configurations of the vLLM in this environment, without importing it; None where there
    are none.
    """
    spec = find_spec("vllm")
    for place in (spec and spec.submodule_search_locations) or ():
        folder = Path(place, "model_executor", "layers", "fused_moe", "configs")
        if folder.is_dir():
            return TunedConfigs(folder, tuple(sorted(path.name for path in folder.glob("*.json"))))
    return None


def device_in_file_name(gpu: str) -> str:
    """A GPU as vLLM writes it in these names (vllm 0.32 platform_utils.py:73,
    fused_moe.py:1092).
    """
    name = re.sub(r"[\s/]+", "_", gpu)
    return "NVIDIA_H200" if "H200" in name.split("_") else name


def reads_tuned_configs(checkpoint: Checkpoint, args: Mapping[str, Any]) -> bool:
    """Whether experts of this checkpoint may run in Triton, and the variable changes nothing else.

    With LoRA it would: vLLM 0.32 lora/layers/fused_moe.py:146 takes other kernel defaults whenever
    it is set.
    """
    scheme = checkpoint.scheme
    only_nvfp4 = scheme.is_nvfp4 and scheme.name != "MIXED_PRECISION"
    return (
        checkpoint.num_experts is not None
        and not only_nvfp4
        and args.get("--enable-lora") is not True
    )


def choose_alias(
    hardware: Hardware,
    target: Target,
    checkpoint: Checkpoint | None,
    found: TunedConfigs | None,
    args: Mapping[str, Any],
    cache: Path,
) -> Alias | None:
    """The folder for the machine that is here and this checkpoint; an assumed GPU has no product
    name.
    """
    if hardware.assumed or not hardware.gpus or checkpoint is None or found is None:
        return None
    if not reads_tuned_configs(checkpoint, args):
        return None
    return find_alias(hardware.gpus[0].name, target, found, cache)


def find_alias(gpu: str, target: Target, found: TunedConfigs, cache: Path) -> Alias | None:
    """The folder for the GPU called `gpu`; None where it has tuned files, or no known
    sibling of its capability has.
    """
    device, model = device_in_file_name(gpu), target.gpu_model(gpu)
    by_device = _by_device(found.names)
    if model is None or device in by_device:
        return None
    siblings = _siblings(model, target, by_device)
    links: dict[str, str] = {}
    for sibling in siblings:
        for name in by_device[sibling]:
            links.setdefault(_DEVICE.sub(device, name), name)
    if not links:
        return None
    counts = {sibling: _model(target, sibling).sm_count for sibling in siblings}  # type: ignore[union-attr]
    shown = ", ".join(f"{sibling} ({count} SMs)" for sibling, count in counts.items())
    reason = (
        f"vLLM has no MoE tuning for {device} ({model.sm_count} SMs): nibble uses that of"
        f" {shown}; unmeasured"
        " here"
    )
    return Alias(found.folder, links, cache / "moe-configs" / device, reason)


def _by_device(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        if match := _DEVICE.search(name):
            found.setdefault(match[0], []).append(name)
    return found


def _model(target: Target, device: str) -> GpuModel | None:
    return target.gpu_model(device.replace("_", " "))


def _siblings(model: GpuModel, target: Target, devices: Iterable[str]) -> list[str]:
    """Devices of the same capability, and so the same shared memory, whose SM count is nearest;
    nearest bandwidth first.
    """
    models = {device: found for device in devices if (found := _model(target, device))}
    same = {
        device: found for device, found in models.items() if found.capability == model.capability
    }
    distance = {device: abs(found.sm_count - model.sm_count) for device, found in same.items()}
    nearest = [device for device, steps in distance.items() if steps == min(distance.values())]
    return sorted(
        nearest,
        key=lambda device: (
            abs(same[device].bandwidth_bytes_per_s - model.bandwidth_bytes_per_s),
            device,
        ),
    )


def make_folder(alias: Alias) -> None:
    """Make the folder hold exactly the alias's links. Raises OSError where it cannot be written."""
    alias.folder.mkdir(parents=True, exist_ok=True)
    for name, source in alias.links.items():
        # Another server may start from the same cache
        step = alias.folder / f".{name}.{os.getpid()}"
        step.unlink(missing_ok=True)
        step.symlink_to(alias.configs / source)
        step.replace(alias.folder / name)
    for path in alias.folder.glob("[!.]*"):
        if path.name not in alias.links:
            path.unlink(missing_ok=True)

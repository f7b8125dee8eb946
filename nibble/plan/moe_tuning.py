"""Tuned Triton MoE configurations for a GPU that has none: those of the most similar GPU.

vLLM 0.32 looks up a file by the GPU's exact product name (fused_moe.py:1089-1103), first in
VLLM_TUNED_CONFIG_FOLDER (fused_moe.py:1135). Its wheel has files for RTX PRO 6000 Server and
Workstation, but not for Max-Q and RTX 5090. nibble creates a folder of links under this GPU's name
and sets the variable to it. For GB10 the wheel has two files; where a model's is missing, nibble
sets the variable to its own data (targets/moe, made by targets/moe/gb10_configs.py). Only experts
that run in Triton read such files: BF16, FP8 and INT8. NVFP4 experts run in CUTLASS, FlashInfer,
b12x or Marlin, which do not.
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
from nibble.machine.paths import root
from nibble.machine.targets import GpuModel, Target
from nibble.plan.choice import tensor_parallel_size

VARIABLE = "VLLM_TUNED_CONFIG_FOLDER"
DATA = "targets/moe"
_DEVICE = re.compile(r"(?<=,device_name=).+?(?=,dtype=|,block_shape=|\.json$)")


@dataclass(frozen=True)
class TunedConfigs:
    """The files of an installed vLLM: `folder` and the names in it."""

    folder: Path
    names: tuple[str, ...]


@dataclass(frozen=True)
class Alias:
    """A folder to create. `links` maps a file name with this GPU's name to a file of `configs`.
    Without links it is a folder of nibble's own data.
    """

    configs: Path
    links: Mapping[str, str]
    folder: Path
    reason: str


def installed_configs() -> TunedConfigs | None:
    """The configurations of the installed vLLM, found without importing it; None without vLLM."""
    spec = find_spec("vllm")
    for place in (spec and spec.submodule_search_locations) or ():
        folder = Path(place, "model_executor", "layers", "fused_moe", "configs")
        if folder.is_dir():
            return TunedConfigs(folder, tuple(sorted(path.name for path in folder.glob("*.json"))))
    return None


def device_in_file_name(gpu: str) -> str:
    """A GPU's name as vLLM writes it in file names (vllm 0.32 platform_utils.py:73,
    fused_moe.py:1092).
    """
    name = re.sub(r"[\s/]+", "_", gpu)
    return "NVIDIA_H200" if "H200" in name.split("_") else name


def reads_tuned_configs(checkpoint: Checkpoint, args: Mapping[str, Any]) -> bool:
    """Whether experts of this checkpoint may run in Triton, and the variable has no other effect.

    With LoRA it has: vLLM 0.32 lora/layers/fused_moe.py:146 takes other kernel defaults if it is
    set.
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
    configs: TunedConfigs | None,
    args: Mapping[str, Any],
    cache: Path,
) -> Alias | None:
    """The folder for this machine and checkpoint, or None. An assumed GPU has no product name."""
    if hardware.assumed or not hardware.gpus or checkpoint is None or configs is None:
        return None
    if not reads_tuned_configs(checkpoint, args):
        return None
    gpu = hardware.gpus[0].name
    return find_data(gpu, checkpoint, args, configs) or find_alias(gpu, target, configs, cache)


def find_data(
    gpu: str, checkpoint: Checkpoint, args: Mapping[str, Any], configs: TunedConfigs
) -> Alias | None:
    """nibble's own data for this GPU, if it has files for the checkpoint's experts."""
    device = device_in_file_name(gpu)
    folder = root() / DATA / device
    width = checkpoint.text_config.get("moe_intermediate_size")
    split = tensor_parallel_size(args)
    if not isinstance(width, int) or width % split or not folder.is_dir():
        return None
    begin = f"E={checkpoint.num_experts},N={width // split},"
    if not any(path.name.startswith(begin) for path in folder.glob("*.json")):
        return None
    reason = (
        f"vLLM has no MoE tuning for {checkpoint.num_experts} experts of {width // split} on"
        f" {device}: nibble's is reasoned from vLLM's for 256 of 512; unmeasured"
    )
    return Alias(configs.folder, {}, folder, reason)


def find_alias(gpu: str, target: Target, configs: TunedConfigs, cache: Path) -> Alias | None:
    """The folder for the GPU `gpu`; None if vLLM has files for it, or for no similar GPU."""
    device, model = device_in_file_name(gpu), target.gpu_model(gpu)
    by_device = _by_device(configs.names)
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
        f" {shown}; unmeasured here"
    )
    return Alias(configs.folder, links, cache / "moe-configs" / device, reason)


def _by_device(names: Iterable[str]) -> dict[str, list[str]]:
    by_device: dict[str, list[str]] = {}
    for name in names:
        if match := _DEVICE.search(name):
            by_device.setdefault(match[0], []).append(name)
    return by_device


def _model(target: Target, device: str) -> GpuModel | None:
    return target.gpu_model(device.replace("_", " "))


def _siblings(model: GpuModel, target: Target, devices: Iterable[str]) -> list[str]:
    """Devices of the same capability (and so the same shared memory) with the nearest SM count; the
    nearest bandwidth first.
    """
    models = {device: other for device in devices if (other := _model(target, device))}
    same = {
        device: other for device, other in models.items() if other.capability == model.capability
    }
    distance = {device: abs(other.sm_count - model.sm_count) for device, other in same.items()}
    nearest = [device for device, steps in distance.items() if steps == min(distance.values())]
    return sorted(
        nearest,
        key=lambda device: (
            abs(same[device].bandwidth_bytes_per_s - model.bandwidth_bytes_per_s),
            device,
        ),
    )


def make_folder(alias: Alias) -> None:
    """Make the folder contain exactly the alias's links. Raises OSError if it cannot be written."""
    if not alias.links:
        return  # nibble's own data
    alias.folder.mkdir(parents=True, exist_ok=True)
    for name, source in alias.links.items():
        # Atomic, because another server may start from the same cache.
        link = alias.folder / f".{name}.{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(alias.configs / source)
        link.replace(alias.folder / name)
    for path in alias.folder.glob("[!.]*"):
        if path.name not in alias.links:
            path.unlink(missing_ok=True)

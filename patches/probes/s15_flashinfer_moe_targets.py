"""FlashInfer must build its SM12x MoE kernels for 120f or 121a with a CUTLASS of 4.4 or newer:
older builds gave zeros.
"""

from __future__ import annotations

import importlib
import re
import sys
import types
from pathlib import Path
from typing import Any

from nibble.engine.patching.probe import Finding, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree

ROW = Row(
    id="15",
    title="FlashInfer's CUTLASS FP4 MoE returns zeros on SM120 (flashinfer#2577)",
    how="FlashInfer's own choice of targets for simulated GPUs, and the version of its CUTLASS",
    expect={"0.32.0": "sound"},
    verdict=(
        "Reported for FlashInfer 0.6.1, whose CUTLASS 4.2.1 fails for compute_120a and needs"
        " 120f. Fixed since 0.6.7. Only the GPU can show a wrong number, so this probe checks"
        " versions and flags."
    ),
    instead="pins a FlashInfer with the fix; the canary on the machine compares answers",
    references=(
        "flashinfer-ai/flashinfer#2577, #2798, #2725",
        "flashinfer 0.7.0.post1 compilation_context.py:61",
        "flashinfer 0.7.0.post1 jit/fused_moe.py:63",
    ),
)
GPUS = ((12, 0), (12, 1))
GOOD = {"120f", "121a", "121f"}
OLDEST_CUTLASS = (4, 4)


def probe(tree: Tree) -> Finding:
    """Ask FlashInfer's compilation context on a machine with one GPU of each kind."""
    from probes.support.nvcc import has_cuda_13, package_folder

    package = package_folder("flashinfer")
    if package is None or not (package / "compilation_context.py").is_file():
        return not_applicable("no FlashInfer here")
    if not has_cuda_13():
        return not_applicable("no nvcc of CUDA 13 here: FlashInfer asks it for its version")
    targets = _targets(package)
    cutlass = _cutlass_version(package)
    detail = (
        f"12.0 and 12.1 give {', '.join(targets) or 'nothing'}; CUTLASS {cutlass[0]}.{cutlass[1]}"
    )
    fine = len(targets) == len(GPUS) and set(targets) <= GOOD and cutlass >= OLDEST_CUTLASS
    return sound(detail) if fine else defect(detail)


def _targets(package: Path) -> list[str]:
    import os

    import torch

    os.environ.pop("FLASHINFER_CUDA_ARCH_LIST", None)
    torch.cuda.device_count = lambda: len(GPUS)
    torch.cuda.get_device_capability = lambda device=0: GPUS[int(device)]  # type: ignore[assignment]
    # The package without its __init__, which imports all of FlashInfer and what that needs.
    bare: Any = types.ModuleType("flashinfer")
    bare.__path__ = [str(package)]
    sys.modules["flashinfer"] = bare
    flags = (
        importlib.import_module("flashinfer.compilation_context")
        .CompilationContext()
        .get_nvcc_flags_list([12])
    )
    return sorted(match[1] for flag in flags if (match := re.search(r"code=sm_(\w+)", flag)))


def _cutlass_version(package: Path) -> tuple[int, int]:
    text = (package / "data/cutlass/include/cutlass/version.h").read_text()
    return tuple(
        int(re.search(rf"#define CUTLASS_{part} (\d+)", text)[1]) for part in ("MAJOR", "MINOR")
    )  # type: ignore[index, return-value]

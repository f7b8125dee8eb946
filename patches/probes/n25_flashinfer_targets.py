"""FlashInfer compiles for the GPU it runs on, and a GEMM's workspace stays where captured CUDA
graphs know it to be.

Both are named as causes of the faults with an FP8 KV cache on SM12x (vllm#54225, #52540); no fault
can be shown without a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support import fake_cuda
from probes.support.plans import plan

# Plain 12.x has no FP4, tactics of FP4 MoE fail for 120a (flashinfer#2725), and code for SM120 can
# end in an illegal instruction on SM121 (flashinfer#2927).
RIGHT = {fake_cuda.SM120: "12.0f", fake_cuda.SM121: "12.1a"}
TARGETS = {fake_cuda.SM120: "sm120", fake_cuda.SM121: "gb10"}
VARIABLE = "FLASHINFER_CUDA_ARCH_LIST"

ROW = Row(
    id="N25",
    title="FP8 KV cache with FLASHINFER attention and NVFP4 weights faults on SM12x",
    how=(
        "FlashInfer's own choice of targets for each GPU; a search for what moves the shared GEMM"
        " workspace"
    ),
    expect={"0.32.0": "sound"},
    verdict=(
        "Reported up to FlashInfer 0.6.16. 0.6.1 compiles for 12.0a; 0.7.0.post1, which 0.32.0"
        " pins, for 12.0f and 12.1a by itself, and it no longer moves the workspace of captured"
        " graphs (flashinfer#4666), to which the same faults were traced (#52540)."
    ),
    instead=(
        "Nothing is left to fix. The plan pins the target of each GPU all the same, as the"
        " reporter's cure did, and names TRITON_ATTN as the way out."
    ),
    fix=Fix("rule", "rules/backends.toml sm120-flashinfer-arch, gb10-flashinfer-arch"),
    references=(
        "vllm-project/vllm#54225",
        "vllm-project/vllm#52540",
        "flashinfer-ai/flashinfer#4666",
        "flashinfer 0.7.0.post1 compilation_context.py, gemm/gemm_base.py:165",
    ),
)


def probe(tree: Tree) -> Finding:
    """FlashInfer's targets on each GPU where no variable says, and its workspaces."""
    if not fake_cuda.has_flashinfer_package():
        return not_applicable("flashinfer-python is not installed")
    return _judged({capability: _targets(capability) for capability in RIGHT})


def remedy(tree: Tree) -> Finding:
    """The same with the variable of nibble's plan for the target."""
    found = {}
    for capability, target in TARGETS.items():
        choice = plan(target).env.get(VARIABLE)
        found[capability] = _targets(capability, str(choice.value) if choice else None)
    return _judged(found)


def _targets(capability: tuple[int, int], variable: str | None = None) -> str:
    import torch

    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.version.cuda = "13.0"  # asked where there is no nvcc
    os.environ |= {"CUDA_HOME": "/nonexistent", VARIABLE: variable or ""}
    if not variable:
        del os.environ[VARIABLE]
    from flashinfer.compilation_context import (
        CompilationContext,
    )  # pyright: ignore[reportMissingImports]

    context = CompilationContext()
    return (
        " ".join(sorted(f"{major}.{minor}" for major, minor in context.TARGET_CUDA_ARCHS))
        or "nothing"
    )


def _judged(found: dict[tuple[int, int], str]) -> Finding:
    moves = _workspace_moves()
    shown = ", ".join(f"{major}.{minor}: {found[major, minor]}" for major, minor in found)
    detail = f"{shown}; {moves} places move a GEMM workspace"
    return sound(detail) if found == RIGHT and not moves else defect(detail)


def _workspace_moves() -> int:
    """Calls of resize_ on a workspace in FlashInfer's GEMMs."""
    package = importlib.util.find_spec("flashinfer")
    assert package is not None and package.submodule_search_locations
    folder = Path(next(iter(package.submodule_search_locations)))
    files = list((folder / "gemm").glob("*.py")) or [folder / "gemm.py"]
    return sum(
        len(re.findall(r"\w\.resize_\(", path.read_text())) for path in files if path.is_file()
    )

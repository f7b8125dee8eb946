"""SM121 must have scaled_mm kernels that it can run: the SM120 ones, not SM100's."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from nibble.engine.patching.probe import Finding, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree

ROW = Row(
    id="integrate_gb10_sm121.sh",
    title=(
        "GB10 needs special FP8 scaled_mm kernels (scaled_mm_c3x_sm121.cu,"
        " scaled_mm_sm121_fp8.cu, blockwise)"
    ),
    how=(
        "the tree's dispatcher, compiled for the CPU and asked; nvcc: SM100's tensor core"
        " instructions for SM12x"
    ),
    expect={"0.16.0": "sound", "0.32.0": "sound"},
    verdict=(
        "No: 12.1 goes to the SM120 kernels. What dgx-vllm adds calls SM100's kernels, whose"
        " tcgen05 instructions SM12x lacks, and its blockwise kernel only throws. Its build does"
        " not contain them: the script appends its sources after the definition of their module."
    ),
    instead="nothing to change",
    references=(
        (
            "Avarok-Cybersecurity/dgx-vllm ead7ae7 integrate_gb10_sm121.sh:163,"
            " scaled_mm_c3x_sm121.cu:25, scaled_mm_blockwise_sm121_fp8_dispatch.cuh:25"
        ),
        "vllm 0.16 CMakeLists.txt:925",
        "vllm 0.32 csrc/quantization/w8a8/cutlass/scaled_mm_entry.cu:223",
    ),
)
ENTRY = "csrc/quantization/w8a8/cutlass/scaled_mm_entry.cu"
TCGEN05 = '__global__ void fence() { asm volatile("tcgen05.fence::before_thread_sync;"); }\n'


def probe(tree: Tree) -> Finding:
    """Where 12.1 goes, and whether SM100's instructions exist for it."""
    from probes.support.dispatch import answers, find_compiler, function
    from probes.support.nvcc import compile_source, has_cuda_13

    text = function(tree.text(ENTRY), "cutlass_scaled_mm") if tree.has(ENTRY) else None
    if text is None:
        return not_applicable("no csrc with cutlass_scaled_mm in this tree")
    if find_compiler() is None or not has_cuda_13():
        return not_applicable("no C++ compiler or no nvcc of CUDA 13 here")
    kernel = answers({"cutlass_scaled_mm": text}, (121,))["cutlass_scaled_mm"][121]
    with tempfile.TemporaryDirectory() as scratch:
        tcgen05 = {
            arch: compile_source(TCGEN05, arch, Path(scratch)) for arch in ("100a", "121a", "120f")
        }
    has = [arch for arch, done in tcgen05.items() if done]
    anchor = bool(re.search(r"define_gpu_extension_target", tree.text("CMakeLists.txt")))
    detail = (
        f"12.1 goes to {kernel}; tcgen05 exists for {', '.join(has) or 'none'} of"
        f" {', '.join(tcgen05)}; define_gpu_extension_target, which the script looks for, is"
        f" {'there' if anchor else 'not there'}"
    )
    return sound(detail) if "sm120" in kernel and has == ["100a"] else defect(detail)

"""vLLM's FP4 kernels for SM12x do not use CUTLASS's stream-K scheduler, whose workspace breaks
CUDA-graph capture in a fork.
"""

from __future__ import annotations

from nibble.engine.patching.probe import Finding, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree

ROW = Row(
    id="18",
    title="Stream-K kernel crashes in CUDA-graph capture",
    how="source scan: FP4 kernels that name SM120 in csrc",
    expect={"0.16.0": "sound", "0.32.0": "sound"},  # the source archives; a wheel has no csrc
    verdict=(
        "A kernel of the fork Navi-AI-Lab/nvllm, which upstream does not have. Models above 75 GB"
        " fail in capture on GB10 for lack of memory (N14)."
    ),
    instead="nothing to change, and that kernel is not adopted",
    references=("vllm 0.32 csrc/quantization/fp4/nvfp4_scaled_mm_sm120_kernels.cu",),
)


def probe(tree: Tree) -> Finding:
    """Look for the scheduler in the FP4 sources of SM12x; a wheel has none."""
    sources = [
        path
        for path in tree.path("csrc").rglob("*")
        if path.suffix in (".cu", ".cuh") and "sm120" in path.name
    ]
    fp4 = [path for path in sources if "fp4" in path.as_posix()]
    if not fp4:
        return not_applicable("no FP4 kernel sources for SM12x: csrc is in the source archive only")
    found = [
        path.name
        for path in fp4
        if "streamk" in path.read_text(encoding="utf-8").lower().replace("_", "")
    ]
    if found:
        return defect(f"stream-K in {', '.join(found)}")
    return sound(f"no stream-K scheduler in {', '.join(sorted(path.name for path in fp4))}")

"""SM121 must be able to load vLLM's CUTLASS FP8 kernels, for vLLM chooses them there."""

from __future__ import annotations

from nibble.engine.patching.probe import Finding, Row
from nibble.engine.patching.tree import Tree

ROW = Row(
    id="integrate_sm121_fp8_fix_v2.sh",
    title=(
        "CUTLASS FP8 fails on GB10 at run time: refuse 12.1 in CutlassFP8ScaledMMLinearKernel, so"
        " that torch._scaled_mm runs"
    ),
    how="fat binary: what the wheel's SM120 FP8 objects are built for",
    expect={"0.15.1": "defect", "0.16.0": "defect", "0.32.0": "sound"},
    verdict=(
        "True of the CUDA 12 wheels: their FP8 kernels are 120a, which 12.1 cannot load. What"
        " failed in dgx-vllm's own build is not shown. The CUDA 13 wheels carry 120f: no refusal is"
        " needed."
    ),
    instead="nothing to change; builds and installs are asserted to carry 120f (N19)",
    references=(
        "vllm 0.32 CMakeLists.txt:821",
        "vllm 0.32 vllm/model_executor/kernels/linear/scaled_mm/cutlass.py",
        "Avarok-Cybersecurity/dgx-vllm ead7ae7 integrate_sm121_fp8_fix_v2.sh:39",
    ),
)
OBJECTS = ("scaled_mm_c3x_sm120", "scaled_mm_sm120_fp8", "scaled_mm_blockwise_sm120_fp8")


def probe(tree: Tree) -> Finding:
    """Whether 12.1 loads each of the SM120 FP8 objects."""
    from probes.support.wheels import loads

    return loads(tree, OBJECTS, (12, 1))

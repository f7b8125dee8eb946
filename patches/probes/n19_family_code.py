"""A GB10 must be able to load the FP4 kernels of the wheel, whatever
cutlass_scaled_mm_supports_fp4 says about 12.1.
"""

from __future__ import annotations

from nibble.engine.patching.probe import Finding, Fix, Row, defect, sound
from nibble.engine.patching.tree import Tree
from nibble.errors import NibbleError

ROW = Row(
    id="N19",
    title="CUDA 12 wheels on GB10: FP4 code for 120a only, yet supports_fp4(121) is true",
    how="fat binary: what each object of the wheel is built for",
    expect={"0.15.1": "defect", "0.16.0": "defect", "0.32.0": "sound"},
    verdict=(
        "Real in the wheels of 0.15.1 and 0.16.0 and in 0.32.0's cu129 builds: 12.0 in the list"
        " gives 120a there, which only 12.0 loads, and the predicate asks for the family. PyPI's"
        " wheels of 0.32.0 (x86-64 and Arm) are CUDA 13 and carry 120f."
    ),
    instead=(
        "refuses at build a vLLM whose kernels the target cannot load, and every CUDA 12 build;"
        " pins the CUDA 13 wheel"
    ),
    fix=Fix("check", "nibble/engine/gpu_code.py"),
    references=(
        "vllm 0.32 CMakeLists.txt:995",
        "vllm 0.32 csrc/quantization/fp4/nvfp4_scaled_mm_entry.cu:71",
        "vllm 0.32 .buildkite/release-pipeline.yaml:10",
        "vllm-project/vllm#38423",
    ),
)
OBJECTS = (
    "nvfp4_quant_kernels",
    "activation_nvfp4_quant_fusion_kernels",
    "nvfp4_experts_quant",
    "nvfp4_scaled_mm_sm120_kernels",
    "nvfp4_blockwise_moe_kernel",
)


def probe(tree: Tree) -> Finding:
    """Whether 12.1 loads each FP4 object."""
    from probes.support.wheels import loads

    return loads(tree, OBJECTS, (12, 1))


def remedy(tree: Tree) -> Finding:
    """nibble's check refuses such a build for GB10."""
    from nibble.engine.gpu_code import check_binaries
    from nibble.machine.targets import load_target

    try:
        check_binaries(tree, load_target("gb10"))
    except NibbleError as refusal:
        return sound(f"refused: {refusal.what}")
    return defect("nibble's check lets this build pass")

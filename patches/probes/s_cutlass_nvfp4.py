"""SM121 must have an FP4 matrix multiplication it can load; vLLM's own is one."""

from __future__ import annotations

from nibble.engine.patching.probe import Finding, Row
from nibble.engine.patching.tree import Tree

ROW = Row(
    id="cutlass_nvfp4/",
    title="GB10 has no FP4 GEMM: add one (headers, kernels, tests, benchmark)",
    how="fat binary: what the wheel's SM120 FP4 objects are built for",
    expect={"0.15.1": "defect", "0.16.0": "defect", "0.32.0": "sound"},
    verdict=(
        "Nothing but their tests includes these files. Their tensor core kernel is a placeholder:"
        " with ENABLE_TCGEN05_HARDWARE it leaves the sums alone, without it adds 0.001; their"
        " types decode code 1 as 0.25. vLLM has an FP4 GEMM for SM120, which the CUDA 12 wheels"
        " carry as 120a (12.1 cannot load it) and the CUDA 13 ones as 120f."
    ),
    instead="nothing to change; builds and installs are asserted to carry 120f (N19)",
    references=(
        (
            "Avarok-Cybersecurity/dgx-vllm ead7ae7 cutlass_nvfp4/nvfp4_tcgen05_ptx_v2.cuh:167,"
            " 206; cutlass_nvfp4/nvfp4_types.cuh:81"
        ),
        "vllm 0.32 csrc/quantization/fp4/nvfp4_scaled_mm_sm120_kernels.cu",
        "vllm 0.32 CMakeLists.txt:995",
    ),
)
OBJECTS = ("nvfp4_quant_kernels", "nvfp4_scaled_mm_sm120_kernels", "nvfp4_blockwise_moe_kernel")


def probe(tree: Tree) -> Finding:
    """Whether 12.1 loads the objects that quantize to FP4 and multiply in it."""
    from probes.support.wheels import loads

    return loads(tree, OBJECTS, (12, 1))

"""FlashInfer's FP4 headers must compile to the GPU's own conversion for SM121, as FlashInfer
compiles them (sm_121a).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from nibble.engine.patching.probe import Finding, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree

ROW = Row(
    id="7",
    title=("FlashInfer's JIT fails on GB10 for lack of E2M1 conversions: convert in software"),
    how="nvcc: FlashInfer's quantization_utils.cuh and its CUTLASS's float_subbyte.h",
    expect={"0.32.0": "sound"},
    verdict=(
        "Both compile for sm_121a, to the instruction. The patches take SM121 out of CUTLASS's"
        " list, so that it converts in software, and comment out FlashInfer's #error against"
        " plain targets; ptxas refuses those anyway. Failures of the JIT have other causes: no"
        " compiler or an old one (N1 to N5)."
    ),
    instead="nothing to change",
    references=(
        "flashinfer 0.7.0.post1 data/cutlass/include/cutlass/float_subbyte.h:49",
        "flashinfer 0.7.0.post1 data/include/flashinfer/arch_condition.h",
        (
            "Avarok-Cybersecurity/dgx-vllm ead7ae7 fix_flashinfer_e2m1_sm121.py,"
            " patch_flashinfer_fp4.sh"
        ),
    ),
)
CUTLASS = "cutlass/include/cutlass/float_subbyte.h"
QUANTIZATION = "csrc/nv_internal/tensorrt_llm/kernels/quantization_utils.cuh"
INCLUDES = ("include", "csrc/nv_internal", "csrc/nv_internal/include", "cutlass/include")
FLAGS = ("--expt-relaxed-constexpr", "-DENABLE_BF16", "-DENABLE_FP8", "-DENABLE_FP4")
SOURCE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "flashinfer/arch_condition.h"
#include "cutlass/float_subbyte.h"
#include "cutlass/numeric_conversion.h"
#include "tensorrt_llm/kernels/quantization_utils.cuh"
__global__ void quantization_utils(float const* in, uint32_t* out) {
  float array[8];
  for (int i = 0; i < 8; ++i) array[i] = in[8 * threadIdx.x + i];
  out[threadIdx.x] = tensorrt_llm::kernels::fp32_vec_to_e2m1(array);
}
__global__ void float_subbyte(cutlass::Array<float, 8> const* in, cutlass::Array<cutlass::float_e2m1_t, 8>* out) {
  out[threadIdx.x] = cutlass::NumericArrayConverter<cutlass::float_e2m1_t, float, 8>{}(in[threadIdx.x]);
}
"""  # noqa: E501


def probe(tree: Tree) -> Finding:
    """Eight conversions by each header, four instructions each."""
    from probes.support.nvcc import compile_source, has_cuda_13, instructions, package_folder, seen

    package = package_folder("flashinfer")
    if (
        package is None
        or not (package / "data" / QUANTIZATION).is_file()
        or not (package / "data" / CUTLASS).is_file()
    ):
        return not_applicable("no FlashInfer with its sources here")
    if not has_cuda_13():
        return not_applicable("no nvcc of CUDA 13 here")
    includes = [package / "data" / folder for folder in INCLUDES]
    with tempfile.TemporaryDirectory() as scratch:
        native = compile_source(SOURCE, "121a", Path(scratch), includes, FLAGS)
        if native.path is None:
            return defect(f"121a: {native.error}")
        found = instructions(native.path, r"^F2FP\b.*E2M1")
        plain = compile_source(SOURCE, "121", Path(scratch), includes, FLAGS)
    if found is not None and sum(found.values()) != 8:
        return defect(f"121a: {seen(found)}, expected 8")
    return sound(f"121a: {seen(found)}; plain 121: {plain.error or 'compiles'}")

"""vLLM's conversion to FP4 (E2M1) must compile to the GPU's own instruction for GB10, and does:
for 121a and 120f.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from nibble.engine.patching.probe import Finding, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree

ROW = Row(
    id="10",
    title="GB10 lacks cvt.rn.satfinite.e2m1x2.f32: convert to FP4 in software in nvfp4_utils.cuh",
    how="nvcc: the tree's nvfp4_utils.cuh, for three targets",
    expect={"0.16.0": "sound", "0.32.0": "sound"},
    verdict=(
        "GB10's assembler has the instruction for 121a and 120f and refuses it for plain 121, for"
        ' which dgx-vllm compiled (set_gencode_flags_for_srcs with "12.1"). Its routine rounds as'
        " the instruction does, in fifteen lines where one will do."
    ),
    instead=(
        "builds for 12.0f; the first start on a GB10 compares the instruction with software before"
        " it is trusted"
    ),
    references=(
        "vllm 0.32 csrc/quantization/fp4/nvfp4_utils.cuh:71",
        (
            "Avarok-Cybersecurity/dgx-vllm ead7ae7 patch_nvfp4_utils_sw_e2m1.py,"
            " cmake_patch_gb10_nvfp4_v6_full_kernels.sh"
        ),
        "CUDA 13.0 ptxas: Instruction 'cvt with .e2m1x2' not supported on .target 'sm_121'",
    ),
)
FOLDER = "csrc/quantization/fp4"
NATIVE, REFUSED = ("121a", "120f"), ("121",)
SOURCE = """
#include <cstdint>
#include <type_traits>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
namespace at {  // what torch/all.h has done by then in vLLM 0.16
using c10::BFloat16;
using c10::Half;
}
#include "nvfp4_utils.cuh"
__global__ void convert(const float* in, uint32_t* out) {
  float array[8];
  for (int i = 0; i < 8; ++i) array[i] = in[8 * threadIdx.x + i];
  out[threadIdx.x] = vllm::fp32_vec8_to_e2m1(array);
}
"""


def probe(tree: Tree) -> Finding:
    """Compile one conversion of eight values for the targets that have the instruction and for
    those that have not.
    """
    from probes.support.nvcc import compile_source, has_cuda_13, instructions, package_folder, seen

    if not tree.has(f"{FOLDER}/nvfp4_utils.cuh"):
        return not_applicable("no csrc in a wheel")
    torch = package_folder("torch")
    if not has_cuda_13() or torch is None:
        return not_applicable("no nvcc of CUDA 13 or no torch here")
    said = []
    with tempfile.TemporaryDirectory() as scratch:
        for arch in (*NATIVE, *REFUSED):
            done = compile_source(
                SOURCE,
                arch,
                Path(scratch),
                [tree.path(FOLDER), tree.path("csrc"), torch / "include"],
            )
            if done.path is None:
                if arch in NATIVE or "e2m1x2" not in done.error:
                    return defect(f"{arch}: {done.error}")
                said.append(f"{arch}: refused")
                continue
            if arch in REFUSED:
                return not_applicable(f"this nvcc takes the instruction for plain {arch} too")
            found = instructions(done.path, r"^F2FP\b.*E2M1")
            if found is not None and not found:
                return defect(f"{arch}: compiles to no E2M1 instruction")
            said.append(f"{arch}: {seen(found)}")
    return sound("; ".join(said))

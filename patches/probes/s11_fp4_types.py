"""CUDA must have the FP4 type: <cuda_fp4.h> compiles for sm_121a and means what E2M1 means."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from nibble.engine.patching.probe import Finding, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree

ROW = Row(
    id="11",
    title="CUDA 13.0 lacks the FP4 types: put nv_fp4_dummy.h in their place",
    how="nvcc: CUDA's own header for sm_121a, its conversions run on the CPU",
    expect={"0.15.1": "sound", "0.16.0": "sound", "0.32.0": "sound"},
    verdict=(
        "CUDA 13.0 has them. dgx-vllm's header has other values: code 1 is 0.25 instead of 0.5,"
        " 4.5 becomes 6 instead of 4. A program that includes it gets wrong numbers, and one that"
        " includes both gets a redefinition."
    ),
    instead="uses <cuda_fp4.h> as CUDA ships it",
    references=(
        "CUDA 13.0 cuda_fp4.h",
        "Avarok-Cybersecurity/dgx-vllm ead7ae7 nv_fp4_dummy.h:71, 228",
        "Avarok-Cybersecurity/dgx-vllm ead7ae7 patch_flashinfer_fp4.sh",
    ),
)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# dgx-vllm's header, as its own table and its own comparisons say (nv_fp4_dummy.h:38-47, 227-235).
HEADER_CODE_1 = 0.25
HEADER_THRESHOLDS = (0.125, 0.75, 1.25, 1.75, 2.5, 3.5, 4.5)
SOURCE = """
#include <cstdio>
#include <cuda_fp4.h>
__global__ void on_the_gpu(const float* in, __nv_fp4_storage_t* out) {
  out[threadIdx.x] = __nv_cvt_float_to_fp4(in[threadIdx.x], __NV_E2M1, cudaRoundNearest);
}
int main() {
  for (int code = 0; code < 16; ++code)
    std::printf("%g ", (float)__half(__nv_cvt_fp4_to_halfraw(code, __NV_E2M1)));
  for (unsigned step = 0; step <= 256; ++step)  // 0 to 8 in steps of 1/32: every tie and every threshold is among them
    std::printf("%d ", (int)__nv_cvt_float_to_fp4(step / 32.0f, __NV_E2M1, cudaRoundNearest));
}
"""  # noqa: E501


def probe(tree: Tree) -> Finding:
    """Compile a use of the header for sm_121a, and run its conversions on the CPU."""
    from probes.support.nvcc import build_and_run, compile_source, has_cuda_13

    if not has_cuda_13():
        return not_applicable("no nvcc of CUDA 13 here")
    with tempfile.TemporaryDirectory() as scratch:
        on_gpu = compile_source(SOURCE, "121a", Path(scratch))
        if not on_gpu:
            return defect(f"cuda_fp4.h for 121a: {on_gpu.error}")
        words = build_and_run(SOURCE, "121a", Path(scratch)).split()
    values, codes = [float(word) for word in words[:16]], [int(word) for word in words[16:]]
    if values != [*E2M1, *(-value for value in E2M1)]:
        return defect(f"cuda_fp4.h decodes to {values}")
    wrong = [step / 32 for step, code in enumerate(codes) if code != nearest(step / 32)]
    if wrong:
        return defect(f"cuda_fp4.h does not round {wrong[0]} to nearest, ties to even")
    other = [step / 32 for step, code in enumerate(codes) if code != seeds_code(step / 32)]
    return sound(
        f"code 1 is {values[1]:g} (dgx-vllm's: {HEADER_CODE_1}); {len(other)} of {len(codes)}"
        f" numbers from 0 to 8 have another code in dgx-vllm's header, {E2M1[nearest(4.75)]:g} or"
        f" {E2M1[seeds_code(4.75)]:g} for 4.75"
    )


def nearest(value: float) -> int:
    """Round to nearest, ties to the even code."""
    return min(range(8), key=lambda code: (abs(E2M1[code] - value), code & 1))


def seeds_code(value: float, thresholds: Sequence[float] = HEADER_THRESHOLDS) -> int:
    """What dgx-vllm's header makes of a number that is not negative."""
    return sum(value >= threshold for threshold in thresholds)

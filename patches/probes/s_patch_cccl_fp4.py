"""CUDA's C++ library (CCCL) must know the FP4 type by itself, unpatched, for sm_121a."""

from __future__ import annotations

import tempfile
from pathlib import Path

from nibble.engine.patching.probe import Finding, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree

ROW = Row(
    id="patch_cccl_fp4.sh",
    title=(
        "CCCL of CUDA 13.0 names __nv_fp4_e2m1 and does not define it: include nv_fp4_dummy.h there"
    ),
    how="nvcc: CCCL's type trait of the FP4 type, for sm_121a",
    expect={"0.15.1": "sound", "0.16.0": "sound", "0.32.0": "sound"},
    verdict=(
        "CCCL includes <cuda_fp4.h>, which defines it. dgx-vllm's include brings a second"
        " definition of the same name, and any file that includes both no longer compiles."
    ),
    instead="leaves /usr/local/cuda as it is",
    references=(
        "CUDA 13.0 cccl/cuda/std/__floating_point/nvfp_types.h:54",
        "Avarok-Cybersecurity/dgx-vllm ead7ae7 patch_cccl_fp4.sh:35",
    ),
)
TRAIT = """
#include <cuda/std/type_traits>
static_assert(cuda::std::__is_extended_floating_point_v<__nv_fp4_e2m1>);
"""
TWICE = """
struct __nv_fp4_e2m1 { unsigned char __x; };  // as nv_fp4_dummy.h begins
#include <cuda_fp4.h>
"""


def probe(tree: Tree) -> Finding:
    """Compile the trait, and dgx-vllm's definition beside CUDA's."""
    from probes.support.nvcc import compile_source, has_cuda_13

    if not has_cuda_13():
        return not_applicable("no nvcc of CUDA 13 here")
    with tempfile.TemporaryDirectory() as scratch:
        trait = compile_source(TRAIT, "121a", Path(scratch))
        twice = compile_source(TWICE, "121a", Path(scratch))
    if not trait:
        return defect(trait.error)
    return sound(
        f"the trait is true for 121a; with a second definition: {twice.error or 'compiles'}"
    )

"""CUDA's own <cuda_fp4.h> must stay in place: CCCL, FlashInfer and vLLM take their FP4 types
from it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from nibble.engine.patching.probe import Finding, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree

ROW = Row(
    id="integrate_cuda_fp4_extension.sh",
    title=(
        "CUDA lacks an FP4 API: install cutlass_nvfp4/cuda_fp4.h over"
        " /usr/local/cuda/include/cuda_fp4.h"
    ),
    how="nvcc: CCCL with CUDA's header, and with one of that name that lacks CUDA's types",
    expect={"0.15.1": "sound", "0.16.0": "sound", "0.32.0": "sound"},
    verdict=(
        "It replaces CUDA's header by one without CUDA's types, after which CCCL fails with the"
        " very error that nv_fp4_dummy.h and patch_cccl_fp4.sh were written against. Its own values"
        " are wrong too: code 0 decodes to 0.5, 1.0 encodes to code 4, which decodes to 2."
    ),
    instead="leaves /usr/local/cuda as it is",
    references=(
        "Avarok-Cybersecurity/dgx-vllm ead7ae7 integrate_cuda_fp4_extension.sh:24",
        "Avarok-Cybersecurity/dgx-vllm ead7ae7 cutlass_nvfp4/cuda_fp4.h:113, 135",
        "CUDA 13.0 cccl/cuda/std/__type_traits/is_extended_floating_point.h:118",
    ),
)
SOURCE = "#include <cuda/std/type_traits>\n"
ANOTHER = "typedef struct { unsigned char data; } cuda_fp4_t;\n"


def probe(tree: Tree) -> Finding:
    """Compile one header of CCCL with either."""
    from probes.support.nvcc import compile_source, has_cuda_13

    if not has_cuda_13():
        return not_applicable("no nvcc of CUDA 13 here")
    with tempfile.TemporaryDirectory() as scratch:
        own = compile_source(SOURCE, "121a", Path(scratch))
        Path(scratch, "cuda_fp4.h").write_text(ANOTHER)
        replaced = compile_source(SOURCE, "121a", Path(scratch), [Path(scratch)])
    if not own:
        return defect(own.error)
    return sound(
        "CCCL compiles with CUDA's header; with another of that name:"
        f" {replaced.error or 'compiles'}"
    )

"""flashinfer-cubin replaces no compiler on SM 12.x, for it has nothing for it (vllm
utils/flashinfer.py has_flashinfer).
"""

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support import fake_cuda, selection

ROW = Row(
    id="N2",
    title=(
        "flashinfer-cubin without nvcc makes FlashInfer's GEMM and MoE the choice on SM 12.x, which"
        " then cannot be compiled"
    ),
    how="fake CUDA",
    expect={"0.32.0": "defect"},
    verdict=(
        "has_flashinfer() takes flashinfer-cubin for a compiler. The package holds kernels of SM"
        " 10.x (and 11.0) alone, and even what launches those is compiled by the JIT; on SM 12.x"
        " every FlashInfer kernel is."
    ),
    instead=(
        "Cubins do not count; without nvcc or flashinfer-jit-cache vLLM's own CUTLASS kernels,"
        " compiled in its wheel, are taken."
    ),
    fix=Fix("patch", "vllm/flashinfer-jit-ready"),
    references=(
        "vllm 0.32 utils/flashinfer.py:96",
        "flashinfer 0.7.0.post1 artifacts.py:131",
        "flashinfer 0.7.0.post1 jit/gemm/core.py:257",
        "vllm-project/vllm#27990",
    ),
)


def probe(tree: Tree) -> Finding:
    """Ask for the W4A4 linear and MoE kernels of SM120 and SM121 with cubins and no compiler."""
    if not fake_cuda.has_flashinfer_package():
        return not_applicable("FlashInfer is not installed beside this vLLM")
    machine = selection.TOOLCHAINS["cubins"]
    gpus = (fake_cuda.SM120, fake_cuda.SM121)
    answers = selection.ask(
        [selection.Case(gpu, ["linear W4A4", "MoE W4A4"], machine) for gpu in gpus]
    )
    found = [list(answer.values()) for answer in answers]
    detail = f"W4A4 linear and MoE with cubins and no nvcc: SM120 {found[0]}, SM121 {found[1]}"
    return defect(detail) if "flashinfer" in str(found).lower() else sound(detail)

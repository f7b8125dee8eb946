"""FlashInfer is not chosen on SM 12.x with an nvcc older than 12.9, for which it has no target
(vllm utils/flashinfer.py).
"""

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support import fake_cuda, selection

ROW = Row(
    id="N3",
    title=(
        "nvcc older than 12.9 on SM 12.x: FlashInfer is chosen and has no architecture to"
        " compile for"
    ),
    how="fake CUDA",
    expect={"0.32.0": "defect"},
    verdict=(
        'FlashInfer logs "SM 12.x requires CUDA >= 12.9" and goes on without a target; vLLM asks'
        " only whether there is an nvcc. Attention, linear and MoE kernels then fail with"
        ' "FlashInfer requires GPUs with sm75 or higher".'
    ),
    instead=(
        "The release of the nvcc that FlashInfer would run is read; below 12.9 FlashInfer is not"
        " used on SM 12.x."
    ),
    fix=Fix("patch", "vllm/flashinfer-jit-ready"),
    references=(
        "flashinfer 0.7.0.post1 compilation_context.py:74",
        "vllm-project/vllm#50705",
        "vllm-project/vllm#54267 (open; the same check)",
    ),
)
QUESTIONS = ("attention fp8", "linear W4A4", "MoE W4A4")


def probe(tree: Tree) -> Finding:
    """Ask for the kernels of SM120 and SM121 beside nvcc 12.8."""
    if not fake_cuda.has_flashinfer_package():
        return not_applicable("FlashInfer is not installed beside this vLLM")
    machine = selection.TOOLCHAINS["nvcc 12.8"]
    gpus = (fake_cuda.SM120, fake_cuda.SM121)
    answers = selection.ask([selection.Case(gpu, QUESTIONS, machine) for gpu in gpus])
    found = [list(answer.values()) for answer in answers]
    detail = f"with nvcc 12.8: SM120 {found[0]}, SM121 {found[1]}"
    return defect(detail) if "flashinfer" in str(found).lower() else sound(detail)

"""flashinfer-jit-cache with kernels for the GPU is enough for FlashInfer; no compiler is needed
(vllm utils/flashinfer.py).
"""

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support import fake_cuda, selection

ROW = Row(
    id="N4",
    title="flashinfer-jit-cache alone, prebuilt kernels without nvcc, leaves FlashInfer disabled",
    how="fake CUDA",
    expect={"0.32.0": "defect"},
    verdict=(
        "has_flashinfer() does not know flashinfer-jit-cache. It comes as one provider a target"
        " since FlashInfer 0.7, so it counts where one of them runs on this GPU."
    ),
    instead=(
        "A provider for the GPU, of FlashInfer's own version, counts as kernels; one for another"
        " GPU does not."
    ),
    fix=Fix("patch", "vllm/flashinfer-jit-ready"),
    references=("vllm 0.32 utils/flashinfer.py:88", "flashinfer 0.7.0.post1 jit/env.py:175"),
)


def probe(tree: Tree) -> Finding:
    """Ask SM121 without a compiler, with kernels for it and with kernels for Hopper only."""
    if not fake_cuda.has_flashinfer_package():
        return not_applicable("FlashInfer is not installed beside this vLLM")
    base = selection.TOOLCHAINS["none"]
    machines = (base | {"jit_cache": ("sm121a",)}, base | {"jit_cache": ("sm90a",)})
    questions = ("has_flashinfer", "linear W4A4")
    ours, other = selection.ask(
        [selection.Case(fake_cuda.SM121, questions, machine) for machine in machines]
    )
    detail = (
        f"SM121 without nvcc: jit-cache for sm121a {list(ours.values())}, for sm90a only"
        f" {list(other.values())}"
    )
    return (
        sound(detail) if ours["has_flashinfer"] and not other["has_flashinfer"] else defect(detail)
    )

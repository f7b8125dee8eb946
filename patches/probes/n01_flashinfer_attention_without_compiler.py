"""FLASHINFER attention is chosen only where FlashInfer's kernels can be had, prebuilt or
compiled (vllm attention selection).
"""

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support import fake_cuda, selection

ROW = Row(
    id="N1",
    title="FLASHINFER attention is chosen for an FP8 KV cache on a machine that cannot compile it",
    how="fake CUDA",
    expect={"0.32.0": "defect"},
    verdict=(
        "The attention selector never asks whether FlashInfer's kernels can be had. With an FP8 KV"
        " cache, which ModelOpt's NVFP4 checkpoints ask for, SM 12.x takes FLASHINFER first, and"
        " the first plan() fails where nvcc or ninja is missing."
    ),
    instead=(
        "FLASHINFER is refused with the reason where nothing can supply its kernels; TRITON_ATTN is"
        " taken."
    ),
    fix=Fix("patch", "vllm/flashinfer-jit-ready"),
    references=(
        "vllm 0.32 v1/attention/backends/flashinfer.py:571",
        "vllm 0.32 utils/flashinfer.py:88",
        "vllm-project/vllm#50705",
    ),
)


def probe(tree: Tree) -> Finding:
    """Ask the selector of SM120 and SM121 without nvcc and ninja."""
    if not fake_cuda.has_flashinfer_package():
        return not_applicable("FlashInfer is not installed beside this vLLM")
    machine = selection.TOOLCHAINS["none"]
    gpus = (fake_cuda.SM120, fake_cuda.SM121)
    answers = selection.ask([selection.Case(gpu, ["attention fp8"], machine) for gpu in gpus])
    found = [answer["attention fp8"] for answer in answers]
    detail = f"FP8 KV cache without nvcc: SM120 {found[0]}, SM121 {found[1]}"
    return defect(detail) if any("FLASHINFER" in backends for backends in found) else sound(detail)

"""The FlashInfer sampler is used only where its kernels can be had (vllm
v1/sample/ops/topk_topp_sampler.py).
"""

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support import fake_cuda, selection

ROW = Row(
    id="N5",
    title="The FlashInfer sampler is taken without nvcc",
    how="fake CUDA",
    expect={"0.32.0": "defect"},
    verdict=(
        "The sampler's gate asks FlashInfer for a target architecture. Without nvcc FlashInfer"
        " answers from torch.version.cuda, the gate opens, and the build of the sampling module"
        " fails during start-up."
    ),
    instead=(
        "The sampler asks the same question as attention, linear and MoE kernels; vLLM's own top-k"
        " and top-p are used."
    ),
    fix=Fix("patch", "vllm/flashinfer-jit-ready"),
    references=(
        "vllm 0.32 v1/sample/ops/topk_topp_sampler.py:44",
        "flashinfer 0.7.0.post1 jit/cpp_ext.py:80",
        "vllm-project/vllm#42393",
    ),
)


def probe(tree: Tree) -> Finding:
    """Ask for the sampler of SM121 and SM90 without nvcc and ninja."""
    if not fake_cuda.has_flashinfer_package():
        return not_applicable("FlashInfer is not installed beside this vLLM")
    machine = selection.TOOLCHAINS["none"]
    gpus = (fake_cuda.SM121, fake_cuda.SM90)
    found = [
        a["sampler"]
        for a in selection.ask([selection.Case(gpu, ["sampler"], machine) for gpu in gpus])
    ]
    detail = f"FlashInfer sampler without nvcc: SM121 {found[0]}, SM90 {found[1]}"
    return defect(detail) if any(found) else sound(detail)

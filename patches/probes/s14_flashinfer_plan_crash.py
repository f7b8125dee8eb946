"""FLASHINFER is refused where the module its plan() builds cannot be built (vllm
v1/attention/backends/flashinfer.py).
"""

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support import fake_cuda, selection

ROW = Row(
    id="14",
    title="FlashInfer attention crashes in plan() on SM120",
    how="fake CUDA",
    expect={"0.32.0": "defect"},
    verdict=(
        "plan() is where FlashInfer first compiles, and it fails without nvcc (N1). SM120 is not"
        " the cause. With a bf16 KV cache FLASHINFER is only second on SM 12.x, so a server meets"
        " it only on request."
    ),
    instead=(
        "The patch of N1: FLASHINFER, forced or chosen, is refused with the reason before any"
        " kernel is built."
    ),
    fix=Fix("patch", "vllm/flashinfer-jit-ready"),
    references=(
        "vllm 0.15.1 v1/attention/backends/flashinfer.py:1045",
        "vllm 0.32 v1/attention/backends/flashinfer.py:571",
        "flashinfer 0.7.0.post1 prefill.py:528",
    ),
)


def probe(tree: Tree) -> Finding:
    """On SM120 without a compiler: build what plan() builds, and ask vLLM for FLASHINFER all the
    same.
    """
    if not fake_cuda.has_flashinfer_package():
        return not_applicable("FlashInfer is not installed beside this vLLM")
    questions = ("attention bf16", "FLASHINFER forced", "prefill module")
    case = selection.Case(fake_cuda.SM120, questions, selection.TOOLCHAINS["none"])
    answer = selection.ask([case])[0]
    accepted = not answer["FLASHINFER forced"].startswith("refused")
    detail = (
        f"bf16 KV cache: {answer['attention bf16'][0]} first; --attention-backend FLASHINFER is "
        f"{'accepted' if accepted else 'refused'}, and its module: {answer['prefill module']}"
    )
    return defect(detail) if accepted and answer["prefill module"] != "built" else sound(detail)

"""The attention backend of a model with sinks is the same with and without the internet (vllm
utils/flashinfer.py).
"""

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support import fake_cuda, selection

ROW = Row(
    id="N6",
    title="Which attention kernel runs depends on whether NVIDIA's artifactory answers at start",
    how="fake CUDA",
    expect={"0.32.0": "defect"},
    verdict=(
        "supports_trtllm_attention() sends an HTTP request before it allows XQA on SM90 and SM"
        " 12.x. XQA is compiled by the JIT and needs no download: gpt-oss on SM 12.x runs"
        " FLASHINFER online and TRITON_ATTN offline."
    ),
    instead="On SM90 and SM 12.x no request is sent; offline the choice is what it is online.",
    fix=Fix("patch", "vllm/flashinfer-xqa-offline"),
    references=(
        "vllm 0.32 utils/flashinfer.py:620,648",
        "flashinfer 0.7.0.post1 jit/xqa.py:53",
        "vllm-project/vllm#46329 (a comment of 2026-09-22 meets it)",
    ),
)


def probe(tree: Tree) -> Finding:
    """Ask SM121 with a compiler, online and offline, for a model with attention sinks."""
    if not fake_cuda.has_flashinfer_package():
        return not_applicable("FlashInfer is not installed beside this vLLM")
    cases = [
        selection.Case(fake_cuda.SM121, ["attention sinks"], {"online": online})
        for online in (True, False)
    ]
    online, offline = (answer["attention sinks"] for answer in selection.ask(cases))
    detail = f"SM121, attention sinks: online {online}, offline {offline}"
    return sound(detail) if online == offline else defect(detail)

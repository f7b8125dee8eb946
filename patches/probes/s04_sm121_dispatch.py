"""The C++ dispatchers must send SM121 to the SM120 kernels."""

from __future__ import annotations

from nibble.engine.patching.probe import Finding, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree

ROW = Row(
    id="4",
    title="Capability 12.1 is not routed to the SM120 kernels",
    how="the tree's dispatch functions, compiled for the CPU and asked",
    expect={"0.16.0": "sound", "0.32.0": "sound"},
    verdict=(
        "It always was: the conditions are `>= 120` and, for FP4, `>= 120 && < 130`. dgx-vllm only"
        " adds `< 130` to the first."
    ),
    instead="nothing to change",
    references=(
        "vllm 0.32 csrc/quantization/w8a8/cutlass/scaled_mm_entry.cu:223",
        "vllm 0.32 csrc/quantization/fp4/nvfp4_scaled_mm_entry.cu:60",
        "Avarok-Cybersecurity/dgx-vllm ead7ae7 fix_capability_121_v112.py",
    ),
)
DISPATCHERS = {
    "cutlass_scaled_mm": "csrc/quantization/w8a8/cutlass/scaled_mm_entry.cu",
    "cutlass_scaled_fp4_mm": "csrc/quantization/fp4/nvfp4_scaled_mm_entry.cu",
}


def probe(tree: Tree) -> Finding:
    """Which kernel each dispatcher calls on 12.1, and on 12.0 beside it."""
    from probes.support.dispatch import answers, find_compiler, function

    if not all(tree.has(path) for path in DISPATCHERS.values()):
        return not_applicable("no csrc in a wheel")
    if find_compiler() is None:
        return not_applicable("no C++ compiler here")
    texts = {name: function(tree.text(path), name) for name, path in DISPATCHERS.items()}
    present = {name: text for name, text in texts.items() if text is not None}
    if len(present) != len(DISPATCHERS):
        return not_applicable("the dispatchers have other names than this probe knows")
    found = answers(present, (121, 120, 103, 90))
    detail = "; ".join(
        f"{name}: 12.1 to {each[121]}, 12.0 to {each[120]}" for name, each in found.items()
    )
    fine = all(
        each[121] == each[120] != "not implemented" and "sm120" in each[121]
        for each in found.values()
    )
    return sound(detail) if fine else defect(detail)

"""FP8 MoE on SM12x must not be offered CUTLASS's grouped GEMM as long as vLLM has no kernel for
it there.
"""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

from nibble.engine.patching.probe import Finding, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree

ROW = Row(
    id="integrate_gb10_native_v109.sh",
    title=(
        "GB10 needs a special grouped GEMM for FP8 MoE (grouped_mm_gb10_native.cu,"
        " grouped_mm_gb10_native_v109.cu)"
    ),
    how="the tree's Python and C++ gates, asked",
    expect={"0.15.1": "sound", "0.16.0": "sound", "0.32.0": "sound"},
    verdict=(
        "vLLM has none for SM12x and says so: cutlass_group_gemm_supported is false, and FP8 MoE"
        " runs on Triton. dgx-vllm's build does not contain its files: they are appended after"
        " the definition of the module, and the second names templates that vLLM does not have."
        " CUTLASS 4.5 has no builder for such a kernel (vllm#43507). NVFP4 MoE has an SM120"
        " kernel."
    ),
    instead="nothing to change; FP8 MoE on GB10 takes Triton's tuned tables (row 12)",
    references=(
        "vllm 0.32 vllm/_custom_ops.py:851",
        "vllm 0.32 csrc/quantization/w8a8/cutlass/scaled_mm_entry.cu:176",
        "vllm-project/vllm#43507, #43814",
        (
            "Avarok-Cybersecurity/dgx-vllm ead7ae7 integrate_gb10_native_v109.sh:83,"
            " grouped_mm_gb10_native_v109.cu:120"
        ),
    ),
)
GATE = "cutlass_group_gemm_supported"
ENTRY = "csrc/quantization/w8a8/cutlass/scaled_mm_entry.cu"
SM12X = (120, 121)


def probe(tree: Tree) -> Finding:
    """What vLLM says about 12.0 and 12.1, and in its sources which kernel it would call."""
    from probes.support.dispatch import answers, find_compiler, function

    offered = _offered(tree)
    if offered is None:
        return not_applicable(f"vllm/_custom_ops.py has no {GATE}")
    detail = (
        f"{GATE} of vllm/_custom_ops.py offers it to"
        f" {', '.join(map(str, offered)) or 'neither 120 nor 121'}"
    )
    text = function(tree.text(ENTRY), "cutlass_moe_mm") if tree.has(ENTRY) else None
    if text is not None and find_compiler():
        called = answers({"cutlass_moe_mm": text}, SM12X)["cutlass_moe_mm"]
        detail += f"; cutlass_moe_mm on 121: {called[121]}"
        return (
            defect(detail)
            if any(called[one] == "not implemented" for one in offered)
            else sound(detail)
        )
    if offered:
        return not_applicable(f"{detail}; whether there is a kernel cannot be seen without csrc")
    return sound(detail)


def _offered(tree: Tree) -> list[int] | None:
    """The SM12x capabilities for which the gate is open when the compiled module says yes to
    everything.
    """
    parsed = ast.parse(tree.text("vllm/_custom_ops.py"))
    gate = next(
        (one for one in parsed.body if isinstance(one, ast.FunctionDef) and one.name == GATE), None
    )
    if gate is None:
        return None
    yes = SimpleNamespace(
        ops=SimpleNamespace(_C=SimpleNamespace(**{GATE: lambda capability: True}))
    )
    scope: dict[str, Any] = {"torch": yes}
    exec(compile(ast.Module([gate], []), "_custom_ops.py", "exec"), scope)
    return [capability for capability in SM12X if scope[GATE](capability)]

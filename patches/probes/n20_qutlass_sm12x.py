"""fp_quant must not be offered where QuTLASS has no code that the GPU loads."""

from __future__ import annotations

import re

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree

ROW = Row(
    id="N20",
    title="fp_quant admits every capability from 10.0 on; QuTLASS has no code for SM12x",
    how="fat binary: QuTLASS's objects, beside fp_quant's own minimum",
    expect={"0.16.0": "defect", "0.32.0": "defect"},
    verdict=(
        "In 0.32.0's wheel _qutlass_C is 100f only, for its CMake builds one family a module and"
        " takes SM100's where both are asked for: no kernel image on 12.0 and 12.1. In 0.16.0 it"
        " was 100a and 120a: none on 12.1."
    ),
    instead="refuses fp_quant on SM12x when planning",
    fix=Fix("rule", "rules/backends.toml sm12x-fp-quant"),
    references=(
        "vllm 0.32 vllm/model_executor/layers/quantization/fp_quant.py:63",
        "vllm 0.32 cmake/external_projects/qutlass.cmake:66",
    ),
)
FP_QUANT = "vllm/model_executor/layers/quantization/fp_quant.py"
OBJECTS = ("fused_quantize_mx", "fused_quantize_nv")
SM12X = {"sm120": (12, 0), "gb10": (12, 1)}


def probe(tree: Tree) -> Finding:
    """Which of the SM12x GPUs fp_quant admits, and which of those load QuTLASS."""
    from probes.support.wheels import objects_named

    found = objects_named(tree, OBJECTS)
    if len(found) != len(OBJECTS) or not tree.has(FP_QUANT):
        return not_applicable("no compiled QuTLASS or no fp_quant in this tree")
    least = re.search(r"def get_min_capability\(.*?return (\d+)", tree.text(FP_QUANT), re.DOTALL)
    if least is None:
        return not_applicable("fp_quant.py states no minimum capability")
    codes = {code for one in found.values() for code in one.codes}
    admitted = [
        capability
        for capability in SM12X.values()
        if capability[0] * 10 + capability[1] >= int(least[1])
    ]
    stuck = [
        capability for capability in admitted if not any(code.runs_on(capability) for code in codes)
    ]
    detail = f"fp_quant from {least[1]} on, QuTLASS for {', '.join(map(str, sorted(codes)))}"
    if stuck:
        return defect(
            f"{detail}: nothing for {', '.join(f'{major}.{minor}' for major, minor in stuck)}"
        )
    return sound(detail)


def remedy(tree: Tree) -> Finding:
    """The rule that forbids it holds for both targets."""
    from nibble.machine.paths import root
    from nibble.recipes.rules import RuleContext, applying, load_rules

    rules = load_rules(root())
    for target in SM12X:
        situation = RuleContext(target=target, model="any", quantization="fp_quant")
        if not any(
            "fp_quant" in rule.forbid.get("quantization", ()) for rule in applying(rules, situation)
        ):
            return defect(f"no rule forbids fp_quant on {target}")
    return sound("fp_quant is refused on sm120 and gb10 when planning")

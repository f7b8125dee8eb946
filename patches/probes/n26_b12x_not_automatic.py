"""vLLM 0.32 leaves the b12x kernels out of its automatic choice, for a reason that has passed or
for none that is given.
"""

from __future__ import annotations

import ast

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support.plans import plan
from probes.support.syntax import find, parse

ORACLE = "vllm/model_executor/layers/fused_moe/oracle/nvfp4.py"
RULE = "b12x-unmeasured"
B12X = {"B12X", "FLASHINFER_B12X"}

ROW = Row(
    id="N26",
    title=(
        "b12x experts are opt-in `until the upstream CUTLASS SM121 MMA op guard is resolved`; it is"
    ),
    how="AST of the list that select_nvfp4_moe_backend tries, and its comment",
    expect={"0.15.1": "not applicable", "0.16.0": "not applicable", "0.32.0": "defect"},
    verdict=(
        "The pinned CuTe DSL 4.8.0 admits sm_121a and sm_121f (read). No reason is given for the"
        " direct B12X. One reporter ran it for 18.5 million prompt tokens on a GB10 (PR 54669),"
        " another met an illegal access with flashinfer_b12x (flashinfer#3170)."
    ),
    instead=(
        "The order stays vLLM's, because no measurement exists: a plan asks for neither, and the"
        " rule b12x-unmeasured warns users who do. flashinfer_b12x has N11 besides."
    ),
    fix=Fix("rule", f"rules/backends.toml {RULE}"),
    references=(
        "vllm 0.32 model_executor/layers/fused_moe/oracle/nvfp4.py:200",
        "nvidia-cutlass-dsl 4.8.0 warp/mma.py:445-448",
        "vllm-project/vllm#54666",
        "vllm-project/vllm#54719",
        "flashinfer-ai/flashinfer#3170",
    ),
)


def probe(tree: Tree) -> Finding:
    """Which b12x backends the tree has, which of them it would try, and whether the old reason
    still stands there.
    """
    if not tree.has(ORACLE):
        return not_applicable(f"no {ORACLE}")
    module = parse(tree.path(ORACLE))
    has = _names(find(module, "NvFp4MoeBackend")) & B12X
    selection = find(module, "select_nvfp4_moe_backend")
    if not has or selection is None:
        return not_applicable("no b12x experts in this release")
    tried = (
        set().union(
            *(_names(list_) for list_ in ast.walk(selection) if isinstance(list_, ast.List))
        )
        & B12X
    )
    stale = "CUTLASS SM121 MMA op guard" in tree.text(ORACLE)
    detail = f"has {_shown(has)}, tries {_shown(tried)}" + (
        ", for the guard of old" if stale else ""
    )
    return defect(detail) if has - tried else sound(detail)


def remedy(tree: Tree) -> Finding:
    """A plan keeps to it and warns a user who asks for the direct b12x."""
    for target in ("sm120", "gb10"):
        found, asked = plan(target), plan(target, "--moe-backend", "b12x")
        if any("b12x" in str(choice.value) for choice in found.args.values()):
            return defect(f"the plan for {target} chooses b12x, which is not measured")
        if RULE not in asked.rules or not any("not measured" in notice for notice in asked.notices):
            return defect(f"the plan for {target} takes b12x without a notice")
    return sound(f"no plan chooses b12x; asked for, the rule {RULE} says what it is")


def _names(node: ast.AST | None) -> set[str]:
    """Members of an enumeration or of a list of them."""
    body = getattr(node, "body", None) or getattr(node, "elts", [])
    targets = [part.targets[0] if isinstance(part, ast.Assign) else part for part in body]
    return {
        part.id if isinstance(part, ast.Name) else getattr(part, "attr", "") for part in targets
    }


def _shown(names: set[str]) -> str:
    return " and ".join(sorted(names)) or "neither"

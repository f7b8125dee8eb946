"""The name of Qwen3-Next's in_proj_qkvz must be appended to its prefix once; a fork's base had
both caller and callee do it.
"""

from __future__ import annotations

import ast

from nibble.engine.patching.probe import Finding, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support.syntax import parse, python_files

NAME = "in_proj_qkvz"
LAYER = "model.layers.0.linear_attn"
ROW = Row(
    id="2",
    title="Doubled prefix of Qwen3-Next's in_proj_qkvz",
    how="AST: the prefix expressions of caller and callee, evaluated",
    expect={"0.15.1": "sound", "0.16.0": "sound", "0.32.0": "sound"},
    verdict=(
        "No release has it: the method lived on the main branch for five days (#34492, reverted"
        " in #34683, redone in #34697). dgx-vllm pins a commit between them."
    ),
    instead="nothing to change; nibble does not build from commits between releases",
    references=(
        "vllm-project/vllm#34683",
        "vllm 0.32 model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py:516",
    ),
)


def probe(tree: Tree) -> Finding:
    """Evaluate what prefix each `self.in_proj_qkvz = …` of the tree ends with."""
    seen: list[str] = []
    for path in python_files(tree.root, "vllm/model_executor"):
        if NAME not in path.read_text(encoding="utf-8"):
            continue
        for scope in ast.walk(parse(path)):
            if isinstance(scope, ast.ClassDef):
                seen += _prefixes(scope)
    if not seen:
        return not_applicable(f"no layer of this tree is named {NAME}")
    wrong = [prefix for prefix in seen if prefix != f"{LAYER}.{NAME}"]
    return defect(f"prefix {wrong[0]}") if wrong else sound(f"prefix {seen[0]}")


def _prefixes(scope: ast.ClassDef) -> list[str]:
    """The prefixes that a class's in_proj_qkvz layers get, through its own methods too."""
    methods = {node.name: node for node in scope.body if isinstance(node, ast.FunctionDef)}
    found: list[str] = []
    for node in ast.walk(scope):
        match node:
            case ast.Assign(targets=[ast.Attribute(attr="in_proj_qkvz")], value=ast.Call() as call):
                prefix = _argument(call, LAYER)
                match call.func:
                    case ast.Attribute(value=ast.Name(id="self"), attr=name) if (
                        prefix and name in methods
                    ):
                        calls = [n for n in ast.walk(methods[name]) if isinstance(n, ast.Call)]
                        found += [p for p in (_argument(inner, prefix) for inner in calls) if p]
                    case _ if prefix:
                        found.append(prefix)
    return found


def _argument(call: ast.Call, prefix: str) -> str | None:
    """The value of `prefix=` in a call, where `prefix` is the caller's."""
    for keyword in call.keywords:
        if keyword.arg == "prefix":
            return eval(
                compile(ast.Expression(keyword.value), "<prefix>", "eval"), {"prefix": prefix}
            )
    return None

"""Questions to the compiled modules of a wheel."""

from __future__ import annotations

from collections.abc import Sequence

from nibble.engine.fatbin import GpuObject, gpu_objects
from nibble.engine.gpu_code import compiled_modules
from nibble.engine.patching.probe import Finding, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree


def objects_named(tree: Tree, names: Sequence[str]) -> dict[str, GpuObject]:
    """Those of the named objects that are in any module of vLLM."""
    found: dict[str, GpuObject] = {}
    for path in compiled_modules(tree):
        found |= {one.name: one for one in gpu_objects(path) if one.name in names}
    return found


def loads(tree: Tree, names: Sequence[str], capability: tuple[int, int]) -> Finding:
    """Sound where a GPU of `capability` can load each of the named objects; not applicable where
    they are not there.
    """
    found = objects_named(tree, names)
    if len(found) != len(names):
        return not_applicable(
            "no GPU code of these names in this tree: a source archive, a CPU build, or a"
            " stripped one"
        )
    has = ", ".join(f"{name}: {' '.join(map(str, found[name].codes))}" for name in names)
    stuck = [
        name for name in names if not any(code.runs_on(capability) for code in found[name].codes)
    ]
    shown = ".".join(map(str, capability))
    return defect(f"{shown} loads none of {has}") if stuck else sound(f"{shown} loads {has}")

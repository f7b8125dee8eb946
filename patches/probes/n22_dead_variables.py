"""Variables that old guides set choose backends, and do so still; vLLM 0.32 reads none of them
and only warns.
"""

from __future__ import annotations

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from nibble.errors import NibbleError
from nibble.settings.environment import accept
from probes.support.syntax import Sources

# Set by Dockerfiles and scripts of published guides, with the values they have there.
OF_GUIDES = {
    "VLLM_USE_FLASHINFER_MOE_FP4": "1",
    "VLLM_NVFP4_GEMM_BACKEND": "cutlass",
    "VLLM_TEST_FORCE_FP8_MARLIN": "1",
    "VLLM_USE_NVFP4_CT_EMULATIONS": "1",
    "VLLM_FLASHINFER_MOE_BACKEND": "latency",
}
NAMES = "vllm.envs.environment_variables"

ROW = Row(
    id="N22",
    title="Variables that choose a backend in old guides have no effect",
    how="the tree's own table of variables",
    expect={"0.15.1": "sound", "0.16.0": "sound", "0.32.0": "defect"},
    verdict=(
        "vLLM 0.32 dropped them for --moe-backend, --linear-backend and --attention-backend and"
        " prints a warning for an unknown VLLM_ name."
    ),
    instead=(
        "nibble translates each to today's flag and says so; a VLLM_ name it cannot translate stops"
        " the start (--fail-on-environ-validation is on by default too)."
    ),
    fix=Fix("environment", "nibble/settings/environment.py DEAD_VARIABLES"),
    references=("vllm 0.32 envs.py", "vllm 0.32 platforms/interface.py:1446"),
)


def probe(tree: Tree) -> Finding:
    """Which of the guides' variables the tree has."""
    if not tree.has("vllm/envs.py"):
        return not_applicable("no vllm/envs.py")
    dead = sorted(set(OF_GUIDES) - _names(tree))
    return (
        defect(f"{len(dead)} of {len(OF_GUIDES)} unknown: {', '.join(dead)}")
        if dead
        else sound("all known")
    )


def remedy(tree: Tree) -> Finding:
    """What nibble makes of each that the tree does not have, and of one that never was."""
    known = _names(tree)
    lost, made = [], []
    for name in sorted(set(OF_GUIDES) - known):
        flags = _translated({name: OF_GUIDES[name]}, known)
        made += [f"{flag} {value}" for flag, value in (flags or {}).items()]
        lost += [name] if flags == {} else []
    if _translated({"VLLM_NEVER_WAS": "1"}, known) is not None:
        lost.append("VLLM_NEVER_WAS")
    return (
        defect(f"without effect: {', '.join(lost)}") if lost else sound(f"become {', '.join(made)}")
    )


def _translated(environ: dict[str, str], known: set[str]) -> dict[str, object] | None:
    """The flags nibble starts vLLM with instead; None where it refuses."""
    try:
        return dict(accept(environ, known, in_image=True).flags)
    except NibbleError:
        return None


def _names(tree: Tree) -> set[str]:
    return set(Sources(tree).load(NAMES))

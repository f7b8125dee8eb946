"""Describes how nodes differ in flags, environment, code and models. Pure.

Each node is compared with the first. Digests show whether two nodes differ; `entries` (what a
digest covers) show where.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nibble.cluster.facts import SAME, Problem

Node = Mapping[str, Any]
SHOWN = 3  # files or tensors that a message names
SAME_SETTINGS = "set the same flags and variables on every rank"
SAME_IMAGE = "run the same image on every node"
SAME_MODEL = (
    "put the same files on every node (`nibble pull MODEL --revision …`), or set"
    " NIBBLE_CLUSTER_MODEL=head"
)
# Part of a build (engine/installed.py) -> its name in messages, and the noun for one entry.
PARTS: Mapping[str, tuple[str, str]] = {
    "nibble": ("nibble's code", "file"),
    "plugin": ("nibble's vLLM plugin", "file"),
    "kernels": ("the build of nibble's kernels", "file"),
    "vllm files": ("vLLM's code", "file"),
    "patches": ("the set of vLLM patches", "patch"),
}
UNSET = "unset"


def settings_problems(
    nodes: Sequence[Node], server: Mapping[str, Any] | None = None
) -> list[Problem]:
    """Differences in the flags of ranks that have a plan, and in the environment of all nodes.

    With Ray `server` has the environment that vLLM copies to its workers. A variable that a node
    sets is not replaced (vllm 0.32 v1/executor/ray_executor_v2.py:175).
    """
    first, *others = nodes
    copied = dict((server or {}).get("environment") or {})
    problems: list[Problem] = []
    for node in others:
        facts, first_facts = node["facts"], first["facts"]
        problems += _flags(
            node["name"], facts.get("flags") or {}, first["name"], first_facts.get("flags") or {}
        )
        there = {**copied, **(first_facts.get("environment") or {})}
        here = {**copied, **(facts.get("environment") or {})}
        for name in _differing(here, there):
            what = (
                f"the variable {name} is {here.get(name, UNSET)} and {there.get(name, UNSET)} on"
                f" {first['name']}"
            )
            problems.append(Problem(node["name"], what, SAME_SETTINGS))
    return problems


def _flags(
    name: str, here: Mapping[str, Any], first: str, there: Mapping[str, Any]
) -> Iterator[Problem]:
    """Each differing flag. A JSON flag is compared key by key."""

    def shown(flags: Mapping[str, Any], flag: str) -> str:
        return f"{flags[flag]['value']} ({flags[flag]['source']})" if flag in flags else UNSET

    for flag in _differing(_values(here), _values(there)):
        what = f"{flag} is {shown(here, flag)} and {shown(there, flag)} on {first}"
        yield Problem(name, what, SAME_SETTINGS)


def _values(flags: Mapping[str, Any]) -> dict[str, str]:
    return {flag: setting["value"] for flag, setting in flags.items()}


def differing_parts(node: Node, first: Node) -> list[str]:
    """Parts of the build whose digests or versions differ, except the facts that `facts.SAME`
    compares.
    """
    here, there = node["facts"].get("code") or {}, first["facts"].get("code") or {}
    return [part for part in _differing(here, there) if part not in SAME]


def part_problem(
    node: Node, first: Node, part: str, here: Mapping[str, str], there: Mapping[str, str]
) -> Problem:
    """Names the files or patches that differ; for a part without entries (a compiler) the
    versions.
    """
    label, kind = PARTS.get(part, (part, ""))
    code, first_code = node["facts"].get("code") or {}, first["facts"].get("code") or {}
    if not kind:
        what = (
            f"{part} is {code.get(part, 'absent')} and {first_code.get(part, 'absent')} on"
            f" {first['name']}"
        )
    elif differing := _differing(here, there):
        what = (
            f"{label} differs from that of {first['name']}: {_listed(differing, here, there, kind)}"
        )
    else:
        what = f"{label} differs from that of {first['name']}"
    return Problem(node["name"], what, SAME_IMAGE)


def checkpoint_problem(
    node: Node, first: Node, label: str, here: Mapping[str, str], there: Mapping[str, str]
) -> Problem:
    """Why the model, draft or folder named `label` differs from the first node's."""
    summary_here, summary_there = node["checkpoints"].get(label), first["checkpoints"].get(label)
    if summary_here is None or summary_there is None:
        what = (
            f"it has {'no' if summary_here is None else 'a'} {label}, and {first['name']} has"
            f" {'none' if summary_there is None else 'one'}"
        )
        return Problem(node["name"], what, SAME_SETTINGS)
    for summary, owner in ((summary_here, node), (summary_there, first)):
        if summary["problem"]:
            return Problem(
                owner["name"],
                f"the {_kind_of_model(label)} {summary['folder']}: {summary['problem']}",
                SAME_MODEL,
            )
    where = (
        f"the {_kind_of_model(label)} {_place(summary_here)} is not {_place(summary_there)}"
        f" of {first['name']}"
    )
    differing = _differing(here, there)
    return Problem(
        node["name"],
        f"{where}: {_listed(differing, here, there)}" if differing else where,
        SAME_MODEL,
    )


def _kind_of_model(label: str) -> str:
    return "model" if label.startswith("/") else label


def _place(summary: Mapping[str, str]) -> str:
    """The folder, and the revision if the folder's name does not contain it."""
    revision = summary["revision"]
    is_in_name = not revision or revision in summary["folder"]
    return summary["folder"] + ("" if is_in_name else f" (revision {revision[:12]})")


def _differing(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """Names whose values differ or exist on one side only; files first, then tensors, then
    values.
    """
    names = [name for name in {*here, *there} if here.get(name) != there.get(name)]
    return sorted(
        names, key=lambda name: (name.startswith("values "), name.startswith("tensor "), name)
    )


def _listed(
    names: Sequence[str], here: Mapping[str, str], there: Mapping[str, str], kind: str = ""
) -> str:
    """The first SHOWN names, each with its difference, and how many more differ."""
    shown = [
        f"{_noun(name, kind)} {_difference(here.get(name), there.get(name))}"
        for name in names[:SHOWN]
    ]
    more = len(names) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")


def _noun(name: str, kind: str) -> str:
    return f"{kind} {name}".strip()


def _difference(here: str | None, there: str | None) -> str:
    if here is None or there is None:
        return "is absent" if here is None else "exists only on this node"
    # Show types, shapes and sizes, but not digests.
    return f"has {here}, not {there}" if " " in here and " at " in here else "has other content"

"""How nodes differ that have to be equal: flags, environment, code, checkpoints. Pure.

The others are compared with the first node. Digests say whether they differ, `entries` (what a
digest covers) say where.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nibble.cluster.facts import SAME, Problem

Node = Mapping[str, Any]
SHOWN = 3  # names of files or tensors in a line
SAME_SETTINGS = "set the same flags and variables on every rank"
SAME_IMAGE = "run the same image on every node"
SAME_MODEL = (
    "put the same files on every node (`nibble pull MODEL --revision …`), or set"
    " NIBBLE_CLUSTER_MODEL=head"
)
# Part of a build (build_id.py) -> how it is called, and what one of its entries is.
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
    """Flags of ranks that have a plan each, and the environment of all.

    With Ray `server` has the environment that vLLM copies to its workers, where a node's variable
    stays (vllm 0.32 v1/executor/ray_executor_v2.py:175).
    """
    first, *others = nodes
    copied = dict((server or {}).get("environment") or {})
    found: list[Problem] = []
    for node in others:
        one, other = node["facts"], first["facts"]
        found += _flags(
            node["name"], one.get("flags") or {}, first["name"], other.get("flags") or {}
        )
        there = {**copied, **(other.get("environment") or {})}
        here = {**copied, **(one.get("environment") or {})}
        for name in _differing(here, there):
            what = (
                f"the variable {name} is {here.get(name, UNSET)} and {there.get(name, UNSET)} on"
                f" {first['name']}"
            )
            found.append(Problem(node["name"], what, SAME_SETTINGS))
    return found


def _flags(
    name: str, here: Mapping[str, Any], first: str, there: Mapping[str, Any]
) -> Iterator[Problem]:
    """A flag of JSON is named with its key."""

    def said(flags: Mapping[str, Any], flag: str) -> str:
        return f"{flags[flag]['value']} ({flags[flag]['source']})" if flag in flags else UNSET

    for flag in _differing(_values(here), _values(there)):
        what = f"{flag} is {said(here, flag)} and {said(there, flag)} on {first}"
        yield Problem(name, what, SAME_SETTINGS)


def _values(flags: Mapping[str, Any]) -> dict[str, str]:
    return {flag: found["value"] for flag, found in flags.items()}


def differing_parts(node: Node, first: Node) -> list[str]:
    """Parts of the build whose digests or versions differ, without separate facts (facts.SAME)."""
    here, there = node["facts"].get("code") or {}, first["facts"].get("code") or {}
    return [part for part in _differing(here, there) if part not in SAME]


def part_problem(
    node: Node, first: Node, part: str, here: Mapping[str, str], there: Mapping[str, str]
) -> Problem:
    """Which files or patches differ; without entries (a compiler) which versions differ."""
    called, kind = PARTS.get(part, (part, ""))
    code, other = node["facts"].get("code") or {}, first["facts"].get("code") or {}
    if not kind:
        what = (
            f"{part} is {code.get(part, 'absent')} and {other.get(part, 'absent')} on"
            f" {first['name']}"
        )
    elif differing := _differing(here, there):
        what = (
            f"{called} differs from that of {first['name']}:"
            f" {_listed(differing, here, there, kind)}"
        )
    else:
        what = f"{called} differs from that of {first['name']}"
    return Problem(node["name"], what, SAME_IMAGE)


def checkpoint_problem(
    node: Node, first: Node, label: str, here: Mapping[str, str], there: Mapping[str, str]
) -> Problem:
    """Why the folder of `label` ("model", "draft" or the common folder) differs from the first
    node's.
    """
    one, other = node["checkpoints"].get(label), first["checkpoints"].get(label)
    if one is None or other is None:
        what = (
            f"it has {'no' if one is None else 'a'} {label}, and {first['name']} has"
            f" {'none' if other is None else 'one'}"
        )
        return Problem(node["name"], what, SAME_SETTINGS)
    for summary, owner in ((one, node), (other, first)):
        if summary["problem"]:
            return Problem(
                owner["name"],
                f"the {_called(label)} {summary['folder']}: {summary['problem']}",
                SAME_MODEL,
            )
    where = f"the {_called(label)} {_place(one)} is not {_place(other)} of {first['name']}"
    differing = _differing(here, there)
    return Problem(
        node["name"],
        f"{where}: {_listed(differing, here, there)}" if differing else where,
        SAME_MODEL,
    )


def _called(label: str) -> str:
    return "model" if label.startswith("/") else label


def _place(summary: Mapping[str, str]) -> str:
    """The folder, with the revision unless its name has it."""
    revision = summary["revision"]
    named = not revision or revision in summary["folder"]
    return summary["folder"] + ("" if named else f" (revision {revision[:12]})")


def _differing(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """Names whose values differ or that one side lacks; configuration before tensors."""
    names = [name for name in {*here, *there} if here.get(name) != there.get(name)]
    return sorted(
        names, key=lambda name: (name.startswith("values "), name.startswith("tensor "), name)
    )


def _listed(
    names: Sequence[str], here: Mapping[str, str], there: Mapping[str, str], kind: str = ""
) -> str:
    """The first names, each with its difference, and how many more there are."""
    shown = [
        f"{_noun(name, kind)} {_matter(here.get(name), there.get(name))}" for name in names[:SHOWN]
    ]
    more = len(names) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")


def _noun(name: str, kind: str) -> str:
    return f"{kind} {name}".strip()


def _matter(here: str | None, there: str | None) -> str:
    if here is None or there is None:
        return "is absent" if here is None else "exists only on this node"
    # Types, shapes and sizes are for people; digests are not.
    return f"has {here}, not {there}" if " " in here and " at " in here else "has other content"

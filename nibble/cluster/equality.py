"""Checks that code and checkpoints of all nodes are equal, first by digest, then by part."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from nibble.cluster.agent import AgentError
from nibble.cluster.caller import Caller, ask_all
from nibble.cluster.differences import PARTS, checkpoint_problem, differing_parts, part_problem
from nibble.cluster.facts import Problem
from nibble.engine.installed import part_files

# A large checkpoint on a network disk: some ten thousand reads (checkpoint_facts.py).
CHECKPOINT_TIMEOUT_S = 300.0
Node = Mapping[str, Any]


def compare_code(
    caller: Caller, nodes: Sequence[Node], server: Mapping[str, Any] | None = None
) -> list[Problem]:
    """Each part of the build of each node against the first node's, and the first node's against
    that of a server through Ray, which runs beside a node and may be of another image.
    """
    first, *others = nodes
    found = _unlike_server(caller, first, server) if server else []
    for node in others:
        for part in differing_parts(node, first):
            here, there = (
                _entries(caller, (node, first), {"part": part}) if part in PARTS else ({}, {})
            )
            found.append(part_problem(node, first, part, here, there))
    return found


def _unlike_server(caller: Caller, node: Node, server: Mapping[str, Any]) -> list[Problem]:
    here = {"name": "the server", "facts": server}
    found: list[Problem] = []
    for part in differing_parts(node, here):
        entries: Mapping[str, str] = {}
        if part in PARTS:
            with contextlib.suppress(AgentError):
                entries = caller.ask(node["address"], "/entries", {"part": part})["entries"]
        found.append(part_problem(node, here, part, entries, part_files(part) if entries else {}))
    return found


def compare_checkpoints(
    caller: Caller, nodes: Sequence[Node], folders: Sequence[str], over: threading.Event
) -> list[Problem]:
    """Model and draft of each node against the first node's: `folders` where all load from one
    place, else each rank's own.
    """

    def ask(node: Node) -> dict[str, Any]:
        return caller.ask(
            node["address"], "/checkpoints", {"folders": list(folders)}, CHECKPOINT_TIMEOUT_S
        )

    told: dict[str, Node] = {}
    problems: list[Problem] = []
    for node, answer in ask_all(nodes, ask, over):
        if isinstance(answer, AgentError):
            problems.append(
                Problem(node["name"], f"it cannot describe its model ({answer})", "see its log")
            )
        else:
            told[node["address"]] = {**node, "checkpoints": answer["checkpoints"]}
    if problems or len(told) < len(nodes):
        return problems
    first, *others = (told[node["address"]] for node in nodes)
    return [problem for node in others for problem in _differences(caller, node, first)]


def _differences(caller: Caller, node: Node, first: Node) -> list[Problem]:
    here, there = node["checkpoints"], first["checkpoints"]
    found: list[Problem] = []
    for label in sorted({*here, *there}, reverse=True):  # the model before its draft
        one, other = here.get(label), there.get(label)
        if one and other and one["digest"] and one["digest"] == other["digest"]:
            continue
        entries: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
        if one and other and one["digest"] and other["digest"]:
            asked = ({"folder": one["folder"]}, {"folder": other["folder"]})
            entries = _entries(caller, (node, first), *asked)
        found.append(checkpoint_problem(node, first, label, *entries))
    return found


def _entries(
    caller: Caller,
    nodes: tuple[Node, Node],
    body: Mapping[str, str],
    of_first: Mapping[str, str] | None = None,
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """What the digests of a node and of the first one are made of; nothing where one does not
    tell, as an older nibble.
    """
    try:
        here = caller.ask(nodes[0]["address"], "/entries", body)["entries"]
        return here, caller.ask(nodes[1]["address"], "/entries", of_first or body)["entries"]
    except AgentError:
        return {}, {}

"""Checks that code and checkpoints of all nodes are equal: first by digest, then by part."""

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

# A large checkpoint on a network disk needs some ten thousand reads (checkpoint_facts.py).
CHECKPOINT_TIMEOUT_S = 300.0
Node = Mapping[str, Any]


def compare_code(
    caller: Caller, nodes: Sequence[Node], server: Mapping[str, Any] | None = None
) -> list[Problem]:
    """Compare each part of each node's build with the first node's.

    A server through Ray runs beside a node and may come from another image, so its build is
    compared with the first node's too.
    """
    first, *others = nodes
    problems = _compare_server(caller, first, server) if server else []
    for node in others:
        for part in differing_parts(node, first):
            here, there = (
                _entries(caller, (node, first), {"part": part}) if part in PARTS else ({}, {})
            )
            problems.append(part_problem(node, first, part, here, there))
    return problems


def _compare_server(caller: Caller, node: Node, server: Mapping[str, Any]) -> list[Problem]:
    server_node = {"name": "the server", "facts": server}
    problems: list[Problem] = []
    for part in differing_parts(node, server_node):
        entries: Mapping[str, str] = {}
        if part in PARTS:
            with contextlib.suppress(AgentError):
                entries = caller.ask(node["address"], "/entries", {"part": part})["entries"]
        problems.append(
            part_problem(node, server_node, part, entries, part_files(part) if entries else {})
        )
    return problems


def compare_checkpoints(
    caller: Caller, nodes: Sequence[Node], folders: Sequence[str], over: threading.Event
) -> list[Problem]:
    """Compare model and draft of each node with the first node's. `folders` are the paths that all
    nodes share; if empty, each rank names its own.
    """

    def ask(node: Node) -> dict[str, Any]:
        return caller.ask(
            node["address"], "/checkpoints", {"folders": list(folders)}, CHECKPOINT_TIMEOUT_S
        )

    described: dict[str, Node] = {}
    problems: list[Problem] = []
    for node, answer in ask_all(nodes, ask, over):
        if isinstance(answer, AgentError):
            problems.append(
                Problem(node["name"], f"it cannot describe its model ({answer})", "see its log")
            )
        else:
            described[node["address"]] = {**node, "checkpoints": answer["checkpoints"]}
    if problems or len(described) < len(nodes):
        return problems
    first, *others = (described[node["address"]] for node in nodes)
    return [problem for node in others for problem in _differences(caller, node, first)]


def _differences(caller: Caller, node: Node, first: Node) -> list[Problem]:
    here, there = node["checkpoints"], first["checkpoints"]
    problems: list[Problem] = []
    for label in sorted({*here, *there}, reverse=True):  # the model before its draft
        summary_here, summary_there = here.get(label), there.get(label)
        if (
            summary_here
            and summary_there
            and summary_here["digest"]
            and summary_here["digest"] == summary_there["digest"]
        ):
            continue
        entries: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
        if summary_here and summary_there and summary_here["digest"] and summary_there["digest"]:
            bodies = ({"folder": summary_here["folder"]}, {"folder": summary_there["folder"]})
            entries = _entries(caller, (node, first), *bodies)
        problems.append(checkpoint_problem(node, first, label, *entries))
    return problems


def _entries(
    caller: Caller,
    nodes: tuple[Node, Node],
    body: Mapping[str, str],
    of_first: Mapping[str, str] | None = None,
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """What the digests of a node and of the first node cover; both empty if a node does not answer,
    such as one with an older nibble.
    """
    try:
        here = caller.ask(nodes[0]["address"], "/entries", body)["entries"]
        return here, caller.ask(nodes[1]["address"], "/entries", of_first or body)["entries"]
    except AgentError:
        return {}, {}

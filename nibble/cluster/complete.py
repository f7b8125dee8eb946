"""Says which nodes are missing, from the head's list and the plan's needs. Pure.

A start and `nibble cluster check` use the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nibble.cluster.roster import LOST_S

AGAIN_S = 60.0
LEAST_NODES = 2  # a cluster has at least two
SEE_NODE = "see that node's log"
GIVE_NUMBER = "start the other nodes, or pass the number of all nodes with --nnodes"
START_NODES = "start the missing nodes, or raise NIBBLE_CLUSTER_WAIT_SECONDS"
INTO_THE_HEAD = (
    "run `serve` beside a Ray node: in containers inside the head's (`docker exec HEAD"
    " /opt/nibble/entrypoint.sh serve …`), else after `ray-head` or `ray-worker` on this machine"
)

Nodes = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Missing:
    """What is missing, and what the user can do."""

    what: str
    action: str = START_NODES


def living(nodes: Nodes) -> list[dict[str, Any]]:
    """The nodes whose last heartbeat is younger than LOST_S."""
    return [node for node in nodes if node["age_s"] < LOST_S]


def missing_ranks(alive: Nodes, count: int) -> Missing | None:
    """Without Ray: requires a node for each rank from 0 to `count` - 1, without processes of an
    earlier run.
    """
    ranks = {node["rank"] for node in alive}
    absent = [str(rank) for rank in range(count) if rank not in ranks]
    if absent:
        return Missing(
            f"no answer from the node{'s' if absent[1:] else ''} with rank {', '.join(absent)}"
        )
    # A rank that ends its part of vLLM also kills its other children, such as the preflight's
    # all-reduce.
    busy = [node["name"] for node in alive if node["busy"]]
    return Missing(f"node {busy[0]} still ends its ranks of the last run") if busy else None


def missing_gpus(alive: Nodes, count: int) -> Missing | None:
    """With Ray: requires `count` GPUs in total, on any nodes."""
    gpus = sum(node["gpus"] for node in alive)
    if gpus >= count:
        return None
    offers = ", ".join(f"{node['address']} with {node['gpus']}" for node in alive)
    return Missing(f"the plan needs {count} GPUs, but the nodes offer {gpus} ({offers})")


def missing_nodes(alive: Nodes, count: int) -> Missing | None:
    """Requires `count` nodes, with or without GPUs."""
    if len(alive) >= count:
        return None
    return Missing(
        f"the plan needs {count} nodes, but only {_names(alive)} answer{'' if alive[1:] else 's'}"
    )


def _names(nodes: Nodes) -> str:
    return ", ".join(node["name"] for node in nodes) or "none"


@dataclass(frozen=True)
class Expected:
    """The number of nodes and, with Ray, of GPUs that a check requires; None if unknown."""

    nodes: int | None
    gpus: int | None


def missing_of(nodes: Nodes, has_ray: bool, expected: Expected) -> Missing | None:
    """What a start would miss. Without a plan: requires two nodes, and all that the head knows."""
    alive = living(nodes)
    if expected.nodes is None and expected.gpus is None:
        for node in nodes:
            if node["age_s"] >= LOST_S:
                return Missing(
                    f"node {node['name']} has not answered for {node['age_s']:.0f} s",
                    SEE_NODE,
                )
        if len(alive) < LEAST_NODES:
            return Missing(
                f"only {_names(alive)} answers" if alive else "no node has joined", GIVE_NUMBER
            )
        return None
    if expected.nodes is not None and not has_ray:
        return missing_ranks(alive, expected.nodes)
    missing = missing_nodes(alive, expected.nodes) if expected.nodes is not None else None
    return missing or (missing_gpus(alive, expected.gpus) if expected.gpus is not None else None)


class Reminder:
    """Decides when to repeat a line: when it changes, and every AGAIN_S while it stays the same. A
    line in which only numbers differ is the same.
    """

    def __init__(self) -> None:
        self._last, self._said_at = "", float("-inf")

    def is_due(self, text: str, now_s: float) -> bool:
        """Whether to print `text` at `now_s` (monotonic). If so, records it as printed."""
        kind = re.sub(r"\d+(\.\d+)?", "#", text)
        if kind == self._last and now_s - self._said_at < AGAIN_S:
            return False
        self._last, self._said_at = kind, now_s
        return True

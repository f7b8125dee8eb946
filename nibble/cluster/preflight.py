"""Before any weights load: do the nodes fit together, reach one another, and add up the same numbers fast enough?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from nibble.cluster.agent import AgentError, call
from nibble.cluster.facts import Problem, compare
from nibble.cluster.ports import AGENT_PORT, CHECK_PORT, GCS_PORT, NODE_PORTS
from nibble.errors import ExitCode, NibbleError

GPU_GB_PER_S, CPU_GB_PER_S = 1.0, 0.01
REDUCE_TIMEOUT_S = 100.0
FACTS_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Report:
    """What the preflight found. `reduce` is the slowest rank's all-reduce, None where it was not reached."""

    nodes: Sequence[Mapping[str, Any]]
    problems: Sequence[Problem]
    reduce: Mapping[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        """Plain data for --json and /status."""
        return {
            "nodes": list(self.nodes),
            "problems": [asdict(one) for one in self.problems],
            "reduce": self.reduce,
        }

    def demand(self) -> None:
        """Raises CLUSTER with the first problem and the number of the others."""
        if not self.problems:
            return
        first, more = self.problems[0], len(self.problems) - 1
        what = f"node {first.node}: {first.what}" + (
            f" (and {more} more, `nibble cluster check`)" if more else ""
        )
        raise NibbleError(ExitCode.CLUSTER, what, "", first.action)


@dataclass(frozen=True)
class Caller:
    """How to reach the agents: the token and the environment (TLS). `head` is this cluster's."""

    head: str
    token: str
    environ: Mapping[str, str]

    def ask(
        self, address: str, path: str, body: Mapping[str, Any], timeout_s: float = FACTS_TIMEOUT_S
    ) -> dict[str, Any]:
        return call(address, path, self.token, body, timeout_s, self.environ)


def preflight(
    caller: Caller,
    nodes: Sequence[Mapping[str, Any]],
    *,
    has_ray: bool,
    models: Sequence[str] = (),
    least_gb_per_s: float | None,
    least_memory_bytes: int = 0,
) -> Report:
    """Check `nodes`, the head's own first. Stops at the first group of checks that finds something.

    `models` are folders that every node must have; none where each downloads. `least_gb_per_s` None takes the default.
    """
    problems, fresh = _ask_facts(caller, nodes, models)
    if not problems:
        problems = compare(fresh, least_memory_bytes)
    if not problems:
        problems = _reach(caller, fresh, has_ray)
    if problems:
        return Report(fresh, problems, None)
    reduce, problems = _reduce(caller, fresh, least_gb_per_s)
    return Report(fresh, problems, reduce)


def _ask_facts(
    caller: Caller, nodes: Sequence[Mapping[str, Any]], models: Sequence[str]
) -> tuple[list[Problem], list[Mapping[str, Any]]]:
    """The nodes with their facts of this moment; that they answer is the way from here to them."""
    problems: list[Problem] = []
    fresh: list[Mapping[str, Any]] = []
    for node, answer in _all(nodes, lambda node: caller.ask(node["address"], "/facts", {"models": models})):
        if isinstance(answer, AgentError):
            action = f"let the cluster's nodes reach each other's port {AGENT_PORT}"
            problems.append(Problem(node["name"], f"port {AGENT_PORT} cannot be reached ({answer})", action))
            continue
        fresh.append({**node, "facts": answer})
        for folder in [one for one in models if answer["models"][one] != "here"]:
            action = "set NIBBLE_CLUSTER_MODEL=head, or copy the model to the same path there"
            problems.append(
                Problem(node["name"], f"the model {folder} is {answer['models'][folder]}", action)
            )
    return problems, fresh


def _reach(caller: Caller, nodes: Sequence[Mapping[str, Any]], has_ray: bool) -> list[Problem]:
    """Every node to every other's fixed ports, so both ways."""
    names = ("--node-manager-port", "--object-manager-port")
    ports = [AGENT_PORT, *(NODE_PORTS[name] for name in names)] if has_ray else [AGENT_PORT]

    def targets(node: Mapping[str, Any]) -> list[tuple[str, int]]:
        found = [(other["address"], port) for other in nodes if other is not node for port in ports]
        return found + ([(caller.head, GCS_PORT)] if has_ray else [])

    timeout_s = 5.0 + 3.5 * len(nodes) * len(ports)
    problems: list[Problem] = []
    for node, answer in _all(
        nodes, lambda node: caller.ask(node["address"], "/reach", {"targets": targets(node)}, timeout_s)
    ):
        failed = [str(answer)] if isinstance(answer, AgentError) else answer["unreachable"]
        if failed:
            action = "open the ports that docs/cluster.md lists between the nodes"
            problems.append(Problem(node["name"], f"it cannot reach {', '.join(failed)}", action))
    return problems


def _reduce(
    caller: Caller, nodes: Sequence[Mapping[str, Any]], least_gb_per_s: float | None
) -> tuple[Mapping[str, Any] | None, list[Problem]]:
    """One rank on each node; the slowest one counts."""
    ranks = {node["address"]: rank for rank, node in enumerate(nodes)}

    def ask(node: Mapping[str, Any]) -> dict[str, Any]:
        body = {
            "rank": ranks[node["address"]],
            "world": len(nodes),
            "head": nodes[0]["address"],
            "port": CHECK_PORT,
        }
        return caller.ask(node["address"], "/allreduce", body, REDUCE_TIMEOUT_S)

    problems: list[Problem] = []
    answers: list[dict[str, Any]] = []
    for node, answer in _all(nodes, ask):
        if isinstance(answer, AgentError) or "error" in answer:
            why = answer if isinstance(answer, AgentError) else answer["error"]
            action = "look at NIBBLE_CLUSTER_INTERFACE, the firewall, and NCCL_DEBUG=INFO"
            problems.append(Problem(node["name"], f"the all-reduce failed: {why}", action))
        elif not answer["right"]:
            action = "do not serve with this hardware; NCCL_P2P_DISABLE=1 is known to help on PCIe"
            problems.append(Problem(node["name"], "the all-reduce gave wrong sums", action))
        else:
            answers.append({**answer, "node": node["name"]})
    if problems or not answers:
        return None, problems
    return judge(answers, least_gb_per_s)


def judge(
    answers: Sequence[dict[str, Any]], least_gb_per_s: float | None
) -> tuple[dict[str, Any], list[Problem]]:
    """The slowest rank against the pass mark; and whether all loaded the same NCCL. Pure."""
    slowest = min(answers, key=lambda one: one["gb_per_s"])
    problems = [
        Problem(
            one["node"],
            f"it loaded {one['library']} and {answers[0]['node']} {answers[0]['library']}",
            "unset VLLM_NCCL_SO_PATH and LD_LIBRARY_PATH, or set them alike on every node",
        )
        for one in answers[1:]
        if one["library"] != answers[0]["library"]
    ]
    default = GPU_GB_PER_S if slowest["backend"] == "nccl" else CPU_GB_PER_S
    least = default if least_gb_per_s is None else least_gb_per_s
    if slowest["gb_per_s"] < least:
        what = f"the all-reduce over {len(answers)} nodes ran at {slowest['gb_per_s']} GB/s, below {least}"
        action = "use the fast network (NIBBLE_CLUSTER_INTERFACE), or lower NIBBLE_CLUSTER_MIN_GB_PER_S"
        problems.append(Problem(slowest["node"], what, action))
    return {**slowest, "least_gb_per_s": least, "nodes": len(answers)}, problems


def _all(nodes: Sequence[Mapping[str, Any]], ask: Any) -> list[tuple[Mapping[str, Any], Any]]:
    """Ask all nodes at the same time: (node, its answer or the AgentError)."""

    def guarded(node: Mapping[str, Any]) -> Any:
        try:
            return ask(node)
        except AgentError as error:
            return error

    with ThreadPoolExecutor(max_workers=max(1, len(nodes))) as pool:
        return list(zip(nodes, pool.map(guarded, nodes), strict=True))

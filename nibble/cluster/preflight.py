"""The checks before a load: nodes are compatible, reach each other, and reduce correctly."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nibble.cluster.agent import AgentError
from nibble.cluster.caller import FACTS_TIMEOUT_S, Caller, ask_all
from nibble.cluster.differences import settings_problems
from nibble.cluster.equality import compare_checkpoints, compare_code
from nibble.cluster.facts import Problem, compare
from nibble.errors import ExitCode, NibbleError
from nibble.plan.cluster_ports import (
    AGENT_PORT,
    CHECK_PORT,
    GCS_PORT,
    MASTER_PORT,
    NODE_PORTS,
    RAY_PORTS,
)

GPU_GB_PER_S, CPU_GB_PER_S = 1.0, 0.01
REDUCE_TIMEOUT_S = 100.0
HUB_TIMEOUT_S = 120.0  # an unreachable Hub may answer late
# The last port of the range of Ray's workers, checked for all of them.
RAY_WORKER_PORT = NODE_PORTS["--max-worker-port"]


@dataclass(frozen=True)
class Report:
    """What the preflight found. `reduce` is the slowest rank's all-reduce, None if the preflight
    did not get that far.
    """

    nodes: Sequence[Mapping[str, Any]]
    problems: Sequence[Problem]
    reduce: Mapping[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        """Plain data for --json and /status."""
        return {
            "nodes": list(self.nodes),
            "problems": [asdict(problem) for problem in self.problems],
            "reduce": self.reduce,
        }

    def demand(self) -> None:
        """Raise CLUSTER with the first problem and the number of others, if there is one."""
        if not self.problems:
            return
        first, more = self.problems[0], len(self.problems) - 1
        what = f"node {first.node}: {first.what}" + (
            f" (and {more} more, `nibble cluster check`)" if more else ""
        )
        raise NibbleError(ExitCode.CLUSTER, what=what, action=first.action)


def preflight(
    caller: Caller,
    nodes: Sequence[Mapping[str, Any]],
    *,
    has_ray: bool,
    models: Sequence[str] = (),
    hub: Mapping[str, str | None] | None = None,
    first_gives: bool = False,
    ports: Sequence[int] = (MASTER_PORT,),
    least_gb_per_s: float | None,
    least_memory_bytes: int = 0,
    server: Mapping[str, Any] | None = None,
    over: threading.Event | None = None,
) -> Report:
    """Check `nodes`, the head's first. Stops at the first group of checks that finds a problem.
    Returns without a result as soon as `over` is set.

    `models` are folders that every node must have; empty if each node downloads. `hub` is the
    "model" and "revision" that each node must have or be able to download. Ray's workers look in
    one place, so with Ray all nodes but the first must have it. With `first_gives` only the first
    node needs either. `ports` are vLLM's ports on the head, without Ray. `least_gb_per_s` None
    takes the default. `server` are the `rank_facts` of a server through Ray.
    """
    over = over or threading.Event()
    required = {"models": models, "hub": hub}
    problems, described = _ask_facts(caller, nodes, required, first_gives, has_ray, over)
    if described and not problems:
        problems = compare(described, least_memory_bytes) + settings_problems(described, server)
        problems += compare_code(caller, described, server)
    if described and not problems and not (first_gives or over.is_set()):
        problems = compare_checkpoints(caller, described, models, over)
    if not problems:
        problems = _reach(caller, described, has_ray, ports, over)
    if problems or over.is_set():
        return Report(described, problems, None)
    reduce, problems = _reduce(caller, described, least_gb_per_s, over)
    return Report(described, problems, reduce)


def _ask_facts(
    caller: Caller,
    nodes: Sequence[Mapping[str, Any]],
    required: Mapping[str, Any],
    first_gives: bool,
    has_ray: bool,
    over: threading.Event,
) -> tuple[list[Problem], list[Mapping[str, Any]]]:
    """The nodes with their current facts. Their answers also show that this machine reaches them.
    `required` are the models.
    """
    problems: list[Problem] = []
    described: dict[str, Mapping[str, Any]] = {}
    timeout_s = HUB_TIMEOUT_S if required["hub"] else FACTS_TIMEOUT_S
    advice = (
        f"run `nibble pull {required['hub']['model']}`"
        if required["hub"]
        else "copy the model to the same path"
    )

    def ask(node: Mapping[str, Any]) -> dict[str, Any]:
        body = {} if first_gives and node is not nodes[0] else required
        return caller.ask(node["address"], "/facts", body, timeout_s)

    for node, answer in ask_all(nodes, ask, over):
        if isinstance(answer, AgentError):
            problems.append(_call_problem(node, answer))
            continue
        described[node["address"]] = {**node, "facts": answer}
        accepted = ("here",) if has_ray and node is not nodes[0] else ("here", "downloadable")
        for model, state in answer["models"].items():
            if state not in accepted:
                action = f"set NIBBLE_CLUSTER_MODEL=head, or {advice} there"
                problems.append(Problem(node["name"], f"the model {model} is {state}", action))
    return problems, [described[node["address"]] for node in nodes if node["address"] in described]


def _call_problem(node: Mapping[str, Any], error: AgentError) -> Problem:
    if error.status:
        return Problem(
            node["name"], f"it cannot describe itself ({error})", "fix that, or see its log"
        )
    action = f"open port {AGENT_PORT} between the cluster's nodes"
    return Problem(node["name"], f"port {AGENT_PORT} is unreachable ({error})", action)


def _reach(
    caller: Caller,
    nodes: Sequence[Mapping[str, Any]],
    has_ray: bool,
    ports: Sequence[int],
    over: threading.Event,
) -> list[Problem]:
    """Check that every node reaches the fixed ports of every other node. The agents listen on ports
    that are not open yet.
    """
    opened = (
        {node["address"]: (RAY_WORKER_PORT,) for node in nodes}
        if has_ray
        else {nodes[0]["address"]: ports}
    )
    problems: list[Problem] = []
    try:
        for node, answer in _listen(caller, nodes, opened, over):
            if isinstance(answer, AgentError):
                problems.append(
                    Problem(node["name"], f"it cannot listen ({answer})", "see its log")
                )
            elif answer["taken"] and not has_ray:  # with Ray a worker process may use it
                what = f"another program uses vLLM's port {', '.join(map(str, answer['taken']))}"
                problems.append(Problem(node["name"], what, "end that program"))
        return problems or _reach_all(caller, nodes, has_ray, opened, over)
    finally:
        _listen(caller, nodes, dict.fromkeys(opened, ()), threading.Event())


def _listen(
    caller: Caller,
    nodes: Sequence[Mapping[str, Any]],
    ports: Mapping[str, Sequence[int]],
    over: threading.Event,
) -> list[tuple[Mapping[str, Any], Any]]:
    """Let the agents listen on `ports` (by address), and close the ports of an earlier call."""

    def ask(node: Mapping[str, Any]) -> dict[str, Any]:
        return caller.ask(node["address"], "/listen", {"ports": list(ports[node["address"]])}, 5.0)

    return ask_all([node for node in nodes if node["address"] in ports], ask, over)


def _reach_all(
    caller: Caller,
    nodes: Sequence[Mapping[str, Any]],
    has_ray: bool,
    opened: Mapping[str, Sequence[int]],
    over: threading.Event,
) -> list[Problem]:
    fixed = [AGENT_PORT, *RAY_PORTS] if has_ray else [AGENT_PORT]

    def targets(node: Mapping[str, Any]) -> list[tuple[str, int]]:
        others = [other["address"] for other in nodes if other is not node]
        ports = [(other, port) for other in others for port in (*fixed, *opened.get(other, ()))]
        return ports + ([(caller.head, GCS_PORT)] if has_ray else [])

    timeout_s = 5.0 + 3.5 * len(nodes) * (len(fixed) + 2)

    def ask(node: Mapping[str, Any]) -> dict[str, Any]:
        return caller.ask(node["address"], "/reach", {"targets": targets(node)}, timeout_s)

    problems: list[Problem] = []
    for node, answer in ask_all(nodes, ask, over):
        failed = [str(answer)] if isinstance(answer, AgentError) else answer["unreachable"]
        if failed:
            action = "open the ports that docs/cluster.md lists between the nodes"
            problems.append(Problem(node["name"], f"it cannot reach {', '.join(failed)}", action))
    return problems


def _reduce(
    caller: Caller,
    nodes: Sequence[Mapping[str, Any]],
    least_gb_per_s: float | None,
    over: threading.Event,
) -> tuple[Mapping[str, Any] | None, list[Problem]]:
    """Run one rank on each node and judge the slowest.

    The node that fails first has the first problem: the others wait for it until their timeout.
    """
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
    for node, answer in ask_all(nodes, ask, over):
        if isinstance(answer, AgentError) or "error" in answer:
            why = answer if isinstance(answer, AgentError) else answer["error"]
            action = (
                "check NIBBLE_CLUSTER_INTERFACE, the firewall, and the log with NCCL_DEBUG=INFO"
            )
            problems.append(Problem(node["name"], f"the all-reduce failed: {why}", action))
        elif not answer["right"]:
            action = (
                "set NCCL_P2P_DISABLE=1, which helps on PCIe, or do not serve with this hardware"
            )
            problems.append(Problem(node["name"], "the all-reduce gave wrong sums", action))
        else:
            answers.append({**answer, "node": node["name"]})
    if problems or over.is_set():
        return None, problems
    order = {node["name"]: index for index, node in enumerate(nodes)}
    return judge(sorted(answers, key=lambda answer: order[answer["node"]]), least_gb_per_s)


def judge(
    answers: Sequence[dict[str, Any]], least_gb_per_s: float | None
) -> tuple[dict[str, Any], list[Problem]]:
    """Compare the slowest rank with the minimum, and check that all ranks loaded the same NCCL.
    Pure.
    """
    slowest = min(answers, key=lambda answer: answer["gb_per_s"])
    problems = [
        Problem(
            answer["node"],
            f"it loaded {answer['library']} and {answers[0]['node']} {answers[0]['library']}",
            "unset VLLM_NCCL_SO_PATH and LD_LIBRARY_PATH, or set them equally on every node",
        )
        for answer in answers[1:]
        if answer["library"] != answers[0]["library"]
    ]
    default = GPU_GB_PER_S if slowest["backend"] == "nccl" else CPU_GB_PER_S
    least = default if least_gb_per_s is None else least_gb_per_s
    # A single node sends nothing over the network.
    if len(answers) > 1 and slowest["gb_per_s"] < least:
        what = (
            f"the all-reduce over {len(answers)} nodes ran at {slowest['gb_per_s']} GB/s, below"
            f" {least}"
        )
        action = (
            "use the fast network (NIBBLE_CLUSTER_INTERFACE), or lower NIBBLE_CLUSTER_MIN_GB_PER_S"
        )
        problems.append(Problem(slowest["node"], what, action))
    return {**slowest, "least_gb_per_s": least, "nodes": len(answers)}, problems

"""`nibble cluster status` and `nibble cluster check`: both ask the head, from any machine that has the token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nibble.cluster.agent import AgentError
from nibble.cluster.facts import usable_rdma
from nibble.cluster.network import find_interface, network_environ, node_address
from nibble.cluster.preflight import Caller, Report, preflight
from nibble.cluster.roster import LOST_S
from nibble.cluster.token import members_token
from nibble.errors import ExitCode, NibbleError
from nibble.prepare import Asked


def cluster_nodes(asked: Asked) -> dict[str, Any]:
    """The head's list of nodes, its state and its run. Raises CLUSTER where no head answers or the token is refused."""
    return _ask(_caller(asked))


def cluster_check(asked: Asked) -> Report:
    """The preflight over all nodes that the head knows. Not while a model is served: it uses the same network and GPUs."""
    caller = _caller(asked)
    found = _ask(caller)
    if any(node["busy"] for node in found["nodes"]):
        what = "the cluster serves a model, which the all-reduce would disturb"
        raise NibbleError(
            ExitCode.CLUSTER, what, "an idle cluster", "stop the server, or use `nibble cluster status`"
        )
    alive = [node for node in found["nodes"] if node["age_s"] < LOST_S]
    silent = [node for node in found["nodes"] if node["age_s"] >= LOST_S]
    if silent:
        what = f"node {silent[0]['name']} has given no sign of life for {silent[0]['age_s']:.0f} s"
        raise NibbleError(ExitCode.CLUSTER, what, "", "see what that node says")
    if not alive:
        what = f"the head at {caller.head} knows no node yet"
        raise NibbleError(ExitCode.CLUSTER, what, "nodes that have joined", "see what the nodes say")
    nodes = sorted(alive, key=lambda node: node["address"] != caller.head)
    has_ray = any(node["role"].startswith("ray") for node in nodes)
    if has_ray:  # as before a start: a head without GPUs holds no part of a model
        nodes = [node for node in nodes if node["gpus"]] or nodes
    least = asked.settings.cluster_min_gb_per_s
    return preflight(caller, nodes, has_ray=has_ray, least_gb_per_s=least)


def node_rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A line for each node: name, role, GPUs, processes of vLLM's, last sign of life, host and interface."""
    return [
        (
            node["name"],
            node["role"],
            str(node["gpus"]),
            f"{node['busy']} of vLLM's processes" if node["busy"] else "idle",
            "lost" if node["age_s"] >= LOST_S else f"{node['age_s']:.0f} s ago",
            f"{node['facts'].get('host', '?')}, {node['facts'].get('interface', '?')}",
        )
        for node in found["nodes"]
    ]


def network_lines(report: Report) -> list[str]:
    """A line for each node that said what it is: its interface, and the RDMA devices that NCCL would take."""
    return [
        f"node {node['name']}: {node['facts'].get('interface', '?')}, "
        f"RDMA {', '.join(usable_rdma(node['facts'])) or 'none'}"
        for node in report.nodes
    ]


def _caller(asked: Asked) -> Caller:
    settings, environ = asked.settings, asked.accepted.environ
    token = members_token(settings, environ, "asking the cluster")
    head = settings.head_ip or node_address(settings, None)
    address = node_address(settings, settings.head_ip)
    interface = find_interface(settings.cluster_interface, address)
    return Caller(head, token, {**network_environ(address, interface, ()), **environ})


def _ask(caller: Caller) -> dict[str, Any]:
    try:
        return caller.ask(caller.head, "/nodes", {}, 5.0)
    except AgentError as error:
        if error.status == 401:
            what = f"the head at {caller.head} refused this token"
            action = "set RAY_AUTH_TOKEN_FILE to a copy of the head's file"
            raise NibbleError(ExitCode.CLUSTER, what, "the head's token", action) from None
        what = f"no head answers at {caller.head} ({error})"
        raise NibbleError(ExitCode.CLUSTER, what, "a running head", "set HEAD_IP to its address") from None

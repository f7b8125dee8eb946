"""`nibble cluster status` and `nibble cluster check`: both ask the head, from any machine that has the token."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

from nibble.cluster.agent import AgentError
from nibble.cluster.claim import Claim
from nibble.cluster.facts import usable_rdma
from nibble.cluster.network import find_interface, network_environ, node_address
from nibble.cluster.preflight import Caller, Report, preflight
from nibble.cluster.roster import LOST_S, head_first
from nibble.cluster.token import members_token
from nibble.errors import ExitCode, NibbleError
from nibble.prepare import Asked, local_model
from nibble.settings import Settings


def cluster_nodes(asked: Asked) -> dict[str, Any]:
    """The head's list of nodes, its state and its run. Raises CLUSTER where no head answers or the token is refused."""
    return _ask(_caller(asked))


def cluster_check(asked: Asked) -> Report:
    """The preflight over all nodes that the head knows, with the model where one is given.

    Not while a server starts or serves: both use the same ports, network and GPUs.
    """
    caller = _caller(asked)
    with Claim(caller, f"`nibble cluster check` runs on {platform.node()}") as claim:
        try:
            claim.take()
        except AgentError as error:
            if error.status == 400:
                raise _not_idle(str(error)) from None
            raise _no_answer(caller, error) from None
        return _check(caller, asked.settings)


def _check(caller: Caller, settings: Settings) -> Report:
    found = _ask(caller)
    if any(node["busy"] for node in found["nodes"]):
        raise _not_idle("the cluster serves a model")
    alive = [node for node in found["nodes"] if node["age_s"] < LOST_S]
    silent = [node for node in found["nodes"] if node["age_s"] >= LOST_S]
    if silent:
        what = f"node {silent[0]['name']} has given no sign of life for {silent[0]['age_s']:.0f} s"
        raise NibbleError(ExitCode.CLUSTER, what, "", "see what that node says")
    if not alive:
        what = f"the head at {caller.head} knows no node yet"
        raise NibbleError(ExitCode.CLUSTER, what, "nodes that have joined", "see what the nodes say")
    nodes = head_first(alive)
    has_ray = any(node["role"].startswith("ray") for node in nodes)
    if has_ray:  # as before a start: a head without GPUs holds no part of a model
        nodes = [node for node in nodes if node["gpus"]] or nodes
    folder = local_model(settings.model) if settings.model else None
    on_hub = {"model": settings.model, "revision": settings.revision}
    return preflight(
        caller,
        nodes,
        has_ray=has_ray,
        models=[str(folder.resolve())] if folder else [],
        hub=on_hub if settings.model and not folder else None,
        first_gives=settings.cluster_model == "head",
        least_gb_per_s=settings.cluster_min_gb_per_s,
    )


def _not_idle(what: str) -> NibbleError:
    action = "wait until it is over, or stop it; `nibble cluster status` disturbs nothing"
    return NibbleError(ExitCode.CLUSTER, f"{what}: nothing was checked", "an idle cluster", action)


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
    """A line for each node that said what it is: its interface, the RDMA devices that NCCL would take, and the model there."""
    return [
        f"node {node['name']}: {node['facts'].get('interface', '?')}, "
        f"RDMA {', '.join(usable_rdma(node['facts'])) or 'none'}"
        + "".join(
            f", {one} {state.partition(',')[0]}" for one, state in node["facts"].get("models", {}).items()
        )
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
        raise _no_answer(caller, error) from None


def _no_answer(caller: Caller, error: AgentError) -> NibbleError:
    if error.status == 401:
        what = f"the head at {caller.head} refused this token"
        action = "set RAY_AUTH_TOKEN_FILE to a copy of the head's file"
        return NibbleError(ExitCode.CLUSTER, what, "the head's token", action)
    if error.status == 404:
        what = f"the node at {caller.head} is no head"
        return NibbleError(ExitCode.CLUSTER, what, "the address of rank 0 or `ray-head`", "correct HEAD_IP")
    what = f"no head answers at {caller.head} ({error})"
    return NibbleError(ExitCode.CLUSTER, what, "a running head", "set HEAD_IP to its address")

"""`nibble cluster status` and `nibble cluster check`: both ask the head and run on any machine."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nibble.cluster.agent import AgentError
from nibble.cluster.caller import Caller, token_refused
from nibble.cluster.complete import Expected, Reminder, living, missing_of
from nibble.cluster.facts import Problem, usable_rdma
from nibble.cluster.lock import Claim
from nibble.cluster.needs import least_memory_bytes
from nibble.cluster.network import find_interface, network_environ, node_address, resolve
from nibble.cluster.preflight import Report, preflight
from nibble.cluster.ray_reach import unreached
from nibble.cluster.roster import BEAT_S, LOST_S, head_first
from nibble.cluster.token import members_token
from nibble.errors import ExitCode, NibbleError
from nibble.machine.targets import load_target
from nibble.plan.choice import values_of
from nibble.plan.cluster_ports import GCS_PORT, MASTER_PORT, rank_0_ports
from nibble.plan.gather import Asked, local_model, plan_for
from nibble.plan.plan import Plan
from nibble.settings.sources import load_settings

_NOT_WITH_RAY = ("nnodes", "node_rank")


def cluster_nodes(asked: Asked) -> dict[str, Any]:
    """The head's list of nodes, its state and its run. Raises CLUSTER where no head answers or the
    head refuses the token.
    """
    return _ask(_caller(asked))


def cluster_check(asked: Asked, say: Callable[[str], None]) -> Report:
    """Run the checks of a start on all expected nodes, with the model if one is given.

    The number of nodes is --nnodes, else what rank 0 was started with, else (with Ray and a model)
    as many as have the GPUs. A starting or serving server must not run: both use the same ports,
    network and GPUs.
    """
    caller = _caller(asked)
    has_ray = any(node["role"].startswith("ray") for node in _ask(caller)["nodes"])
    plan = plan_for(_as_served(asked, caller.head, has_ray)) if asked.settings.model else None
    with Claim(caller, f"`nibble cluster check` runs on {platform.node()}") as claim:
        nodes = _all_nodes(caller, asked, plan, say)
        try:
            claim.take()
        except AgentError as error:
            if error.status == 400:
                raise _not_idle(str(error)) from None
            raise _no_answer(caller, error) from None
        return _check(caller, asked, plan, nodes, say)


def _all_nodes(
    caller: Caller, asked: Asked, plan: Plan | None, say: Callable[[str], None]
) -> Sequence[dict[str, Any]]:
    """Wait for all expected nodes. Raises CLUSTER where they do not join in time."""
    limit_s = asked.settings.cluster_wait_seconds
    deadline, reminder = time.monotonic() + limit_s, Reminder()
    gpus = plan.topology.ranks if plan and plan.topology.mode == "ray" else None
    while True:
        found = _ask(caller)
        nodes = found["nodes"]
        if any(node["busy"] for node in nodes):
            raise _not_idle("the cluster serves a model")
        has_ray = any(node["role"].startswith("ray") for node in nodes)
        missing = missing_of(
            nodes, has_ray, Expected(asked.settings.nnodes or found.get("expects"), gpus)
        )
        if missing is None:
            return nodes
        if time.monotonic() >= deadline:
            raise NibbleError(
                ExitCode.CLUSTER, what=f"{missing.what} after {limit_s} s", action=missing.action
            )
        if reminder.is_due(missing.what, time.monotonic()):
            say(f"waiting for the cluster, for up to {limit_s} s: {missing.what}; {missing.action}")
        time.sleep(BEAT_S)


def _check(
    caller: Caller,
    asked: Asked,
    plan: Plan | None,
    nodes: Sequence[dict[str, Any]],
    say: Callable[[str], None],
) -> Report:
    settings = asked.settings
    nodes = head_first(living(nodes))
    has_ray = any(node["role"].startswith("ray") for node in nodes)
    if has_ray:  # as before a start: a head without GPUs holds no part of a model
        nodes = [node for node in nodes if node["gpus"]] or nodes
    folder = local_model(settings.model, asked.cache) if settings.model else None
    on_hub = {"model": settings.model, "revision": settings.revision}
    flags = values_of(plan.args) if plan else {}
    report = preflight(
        caller,
        nodes,
        has_ray=has_ray,
        models=[str(folder.resolve())] if folder else [],
        hub=on_hub if settings.model and not folder else None,
        first_gives=settings.cluster_model == "head",
        ports=rank_0_ports(flags) if plan else (MASTER_PORT,),
        least_gb_per_s=settings.cluster_min_gb_per_s,
        least_memory_bytes=_least_memory_bytes(plan, nodes, say),
    )
    return _reached_by_ray(caller, report, say) if has_ray and not report.problems else report


def _least_memory_bytes(
    plan: Plan | None, nodes: Sequence[Mapping[str, Any]], say: Callable[[str], None]
) -> int:
    """Bytes that a start of the model needs on each node; the engine's without a model."""
    there = nodes[0]["facts"].get("target")
    if plan is None:
        return load_target(there).memory.engine_bytes if there and there != "unknown" else 0
    if there == plan.target.name:
        return least_memory_bytes(plan)
    say(
        f"memory is not compared: the nodes have the target {there} and the plan {plan.target.name}"
        f" (--target {there})"
    )
    return 0


def _reached_by_ray(caller: Caller, report: Report, say: Callable[[str], None]) -> Report:
    """Check Ray's connections as a start does, where this machine is one of the nodes: a driver
    needs a Ray node beside it.
    """
    addresses = [node["address"] for node in report.nodes]
    here = caller.environ.get("VLLM_HOST_IP")
    if here not in addresses:
        say(
            "Ray's connections were not checked: run the check on a node (in containers"
            " `docker exec`)"
        )
        return report
    token = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": caller.token,
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    environ = {**caller.environ, "RAY_ADDRESS": f"{caller.head}:{GCS_PORT}", **token}
    why = unreached(addresses, environ, threading.Event())
    action = "see `nibble cluster status`, and restart the Ray node that was away"
    return replace(report, problems=[Problem(caller.head, why, action)] if why else [])


def _as_served(asked: Asked, head: str, has_ray: bool) -> Asked:
    """`asked` as `serve` would read it. With Ray, --nnodes applies to the check alone."""
    values = {"head_ip": head, **asked.command.values}
    environ = dict(asked.accepted.environ)
    if has_ray:
        values = {name: value for name, value in values.items() if name not in _NOT_WITH_RAY} | {
            "cluster": "ray"
        }
        for name in _NOT_WITH_RAY:
            environ.pop(f"NIBBLE_{name.upper()}", None)
    loaded = load_settings(values, environ)
    accepted = replace(asked.accepted, environ=environ)
    return Asked(loaded, accepted, replace(asked.command, values=values))


def _not_idle(what: str) -> NibbleError:
    action = "wait until it ends, or stop it; `nibble cluster status` does not disturb it"
    return NibbleError(
        ExitCode.CLUSTER,
        what=f"{what}: nothing was checked",
        expected="an idle cluster",
        action=action,
    )


def node_rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row for each node: name, role, GPUs, vLLM processes, last heartbeat, host and interface."""
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
    """A line for each node that reported its facts: interface, the RDMA devices that NCCL would
    use, and the model there.
    """
    return [
        f"node {node['name']}: {node['facts'].get('interface', '?')}, "
        f"RDMA {', '.join(usable_rdma(node['facts'])) or 'none'}"
        + "".join(
            f", {one} {state.partition(',')[0]}"
            for one, state in node["facts"].get("models", {}).items()
        )
        for node in report.nodes
    ]


def _caller(asked: Asked) -> Caller:
    settings, environ = asked.settings, asked.accepted.environ
    token = members_token(settings, environ, "asking the cluster")
    if settings.head_ip:
        resolve(settings.head_ip, "HEAD_IP")
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
        return token_refused(caller.head, "this token")
    if error.status == 404:
        what = f"the node at {caller.head} is not a head"
        return NibbleError(
            ExitCode.CLUSTER,
            what=what,
            expected="the address of rank 0 or `ray-head`",
            action="correct HEAD_IP",
        )
    what = f"no head answers at {caller.head} ({error})"
    return NibbleError(
        ExitCode.CLUSTER, what=what, expected="a running head", action="set HEAD_IP to its address"
    )

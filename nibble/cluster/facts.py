"""What a node is, and whether several nodes are compatible.

`collect` and the `…_state` functions read this machine; `compare` is pure.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nibble.cluster.network import mtu, rdma_devices
from nibble.cluster.rank_settings import compared_environment
from nibble.engine.installed import build_id, build_parts
from nibble.errors import NibbleError
from nibble.hub.access import access
from nibble.hub.dry_run import plan_pull
from nibble.hub.files import cached_snapshot, missing_weights
from nibble.machine.disk import free_bytes, gib
from nibble.machine.hardware import Hardware, detect
from nibble.machine.targets import Target, load_target, target_for_capability
from nibble.plan.budget import memory_bytes
from nibble.plan.memory import show_gib

GIB = 1 << 30
LARGEST_SKEW_S = 5.0  # logs, caches and TLS certificates depend on the clock
LEAST_DISK_BYTES = 2 * GIB
# Facts that must be equal on every node -> what to do if one differs.
SAME: Mapping[str, str] = {
    "vllm": "run the same image on every node",
    "torch": "run the same image on every node",
    "python": "run the same image on every node",
    "nccl": "unset VLLM_NCCL_SO_PATH or point it to the same library on every node",
    "driver": "install the same driver on every node",
    "target": "use machines of one kind in a cluster",
    "gpu": "use machines of one kind in a cluster",
    "mtu": "set the same MTU on the cluster's interfaces",
}


@dataclass(frozen=True)
class Problem:
    """Why `node` cannot take part, and what the user can do."""

    node: str
    what: str
    action: str


def collect(
    address: str, interface: str, environ: Mapping[str, str], cache: Path
) -> dict[str, Any]:
    """This node's facts, as plain data. `cache` is nibble's cache folder.

    The first call reads nibble's and the kernels' files (0.1 s).
    """
    hardware = detect(environ)
    target = target_of(hardware)
    return {
        "build": build_id(),
        "code": dict(build_parts()),
        "environment": compared_environment(environ),
        "vllm": _version("vllm"),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "nccl": nccl_library(environ),
        "driver": hardware.driver,
        "target": target.name if target else "unknown",
        "gpu": hardware.gpus[0].name if hardware.gpus else None,
        "gpus": len(hardware.gpus),
        "host": platform.node(),
        "interface": interface,
        "mtu": mtu(interface),
        "rdma": [asdict(device) for device in rdma_devices(address)],
        "rdma_is_off": environ.get("NCCL_IB_DISABLE", "0") == "1",
        # Memory of the GPU with the least, or of the host if this target keeps weights there.
        "memory_available_bytes": memory_bytes(target, hardware)[1] if target else None,
        "disk_free_bytes": free_bytes(cache),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def target_of(hardware: Hardware) -> Target | None:
    """The target of this machine's first GPU, the CPU target without a GPU, None for an unknown
    GPU.
    """
    if not hardware.gpus:
        return load_target("cpu")
    return target_for_capability(hardware.gpus[0].capability)


def nccl_library(environ: Mapping[str, str]) -> str | None:
    """The NCCL that vLLM would load: VLLM_NCCL_SO_PATH, else the wheel's beside torch, or None."""
    if configured := environ.get("VLLM_NCCL_SO_PATH"):
        return configured
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or () if spec else ():
        for library in Path(place).glob("nccl/lib/libnccl.so.2"):
            return str(library)
    return None


def model_state(folder: str) -> str:
    """State of a model folder on this node: "here", "absent" or "incomplete: …"."""
    if not os.path.isdir(folder):
        return "absent"
    missing = missing_weights(Path(folder))
    return f"incomplete: {missing[0]} is missing" if missing else "here"


def hub_state(model: str, revision: str | None, environ: Mapping[str, str]) -> str:
    """State of a Hub model on this node: "here", "downloadable" or "absent, and …".

    Requests listings from the Hub, but downloads nothing.
    """
    try:
        if cached_snapshot(model, revision, access(environ).cache):
            return "here"
        plan = plan_pull(model, revision, environ)
    except NibbleError as error:
        return f"absent, and {error.what}"
    return (
        "downloadable"
        if plan.fits
        else f"absent, and {gib(plan.fetch_bytes)} do not fit in {plan.cache}"
    )


def compare(nodes: Sequence[Mapping[str, Any]], least_memory_bytes: int = 0) -> list[Problem]:
    """What keeps `nodes` (from the roster) from serving together. Each is compared with the
    first.
    """
    first, *others = nodes
    problems = [
        Problem(
            node["name"],
            f"{fact} is {node['facts'].get(fact)!r} and {first['facts'].get(fact)!r} on"
            f" {first['name']}",
            action,
        )
        for node in others
        for fact, action in SAME.items()
        if node["facts"].get(fact) != first["facts"].get(fact)
    ]
    problems += _without_rdma(nodes)
    for node in nodes:
        problems += _node_problems(node, least_memory_bytes)
    return problems


def usable_rdma(facts: Mapping[str, Any]) -> list[str]:
    """The RDMA ports that NCCL would use: InfiniBand ports, and RoCE ports with a GID of the node's
    address.
    """
    if facts.get("rdma_is_off") or not facts.get("gpus"):
        return []
    devices = facts.get("rdma") or ()
    return [
        f"{device['name']}:{device['port']}"
        + ("" if device["gid_index"] is None else f" (GID {device['gid_index']})")
        for device in devices
        if device["gid_index"] is not None or device["link"] == "InfiniBand"
    ]


def _without_rdma(nodes: Sequence[Mapping[str, Any]]) -> list[Problem]:
    """Problems of nodes without RDMA in a cluster where others have it: NCCL chooses RDMA or TCP on
    each node, and nodes with different choices cannot connect.
    """
    with_rdma = [node for node in nodes if usable_rdma(node["facts"])]
    if not with_rdma:
        return []
    first = with_rdma[0]
    where = f"{', '.join(usable_rdma(first['facts']))} on {first['name']}"
    action = (
        "bring up RDMA with the node's address there (`show_gids`), or set NCCL_IB_DISABLE=1 on"
        " every node"
    )
    return [
        Problem(
            node["name"],
            f"it has no RDMA device with a GID of its address, but there is one {where}",
            action,
        )
        for node in nodes
        if node not in with_rdma
    ]


def _node_problems(node: Mapping[str, Any], least_memory_bytes: int) -> list[Problem]:
    """Problems of one node alone: its clock, disk and memory."""
    name, facts, problems = node["name"], node["facts"], []
    if abs(skew := float(node.get("skew_s") or 0)) > LARGEST_SKEW_S:
        problems.append(
            Problem(
                name,
                f"its clock differs by {skew:.0f} s from the head's",
                "synchronise the clocks (NTP)",
            )
        )
    disk = facts.get("disk_free_bytes")
    if disk is not None and disk < LEAST_DISK_BYTES:
        problems.append(Problem(name, f"only {show_gib(disk)} of disk are free", "free space"))
    memory = facts.get("memory_available_bytes")
    if memory is not None and memory < least_memory_bytes:
        what = (
            f"{show_gib(memory)} of memory are available, but the plan needs"
            f" {show_gib(least_memory_bytes)}"
        )
        problems.append(Problem(name, what, "stop other programs there"))
    return problems

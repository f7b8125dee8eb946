"""Where a model's ranks run: on this machine, or on several with or without Ray. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from nibble.errors import ExitCode, NibbleError
from nibble.plan.cluster_ports import MASTER_PORT
from nibble.settings.options import Settings

Mode = Literal["machine", "mp", "ray"]
BACKEND = "--distributed-executor-backend"


@dataclass(frozen=True)
class Topology:
    """How many ranks there are, and where they run.

    `ranks` counts all of them (tensor x pipeline x data parallel), `ranks_here` those of this
    machine. Ray places ranks itself, so with Ray `ranks_here` is at most this machine's GPUs.
    `nodes` is None with Ray. `reason` explains `mode`.
    """

    mode: Mode
    ranks: int
    ranks_here: int
    nodes: int | None
    node_rank: int
    head: str | None
    reason: str

    @property
    def is_headless(self) -> bool:
        """Whether this machine has ranks of the model but no API."""
        return self.mode == "mp" and self.node_rank > 0

    @property
    def spans_machines(self) -> bool:
        """Whether the model needs other machines."""
        return self.mode != "machine"

    def to_json(self) -> dict[str, Any]:
        """Plain data for --json."""
        return asdict(self)


def sizes(values: Mapping[str, Any]) -> tuple[int, int, int]:
    """(tensor, pipeline, data) parallel sizes in vLLM's flags."""
    names = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")
    tensor, pipeline, data = (int(values.get(name) or 1) for name in names)
    return tensor, pipeline, data


def find_topology(settings: Settings, values: Mapping[str, Any], gpus_here: int | None) -> Topology:
    """The topology for these settings and flags. `gpus_here` is None on a CPU, where ranks are
    processes.

    Raises USAGE for a missing address or number, CONFIG for contradictions.
    """
    tensor, pipeline, data = sizes(values)
    if data < 1:
        what = f"--data-parallel-size is {data}"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="1 or more",
            action="correct or drop --data-parallel-size",
        )
    ranks = tensor * pipeline * data
    nodes, rank = int(values.get("--nnodes") or 1), int(values.get("--node-rank") or 0)
    backend = values.get(BACKEND)
    # Without an address, vLLM's replicas through Ray would start a separate cluster here (vllm 0.32
    # v1/engine/utils.py:547).
    if settings.cluster == "ray" or "ray" in (backend, values.get("--data-parallel-backend")):
        return _on_ray(settings, ranks, nodes, gpus_here, "set by the user")
    if nodes > 1:
        return _without_ray(settings, ranks, nodes, rank)
    if rank:
        what = f"NIBBLE_NODE_RANK is {rank}, but NIBBLE_NNODES is unset"
        raise NibbleError(
            ExitCode.USAGE,
            what=what,
            expected="both",
            action="set NIBBLE_NNODES to the number of machines",
        )
    ranks_here = tensor * pipeline * replicas_here(values)
    fit = ranks_here <= (1 if gpus_here is None else gpus_here)
    if settings.head_ip and not fit and "--nnodes" not in values:
        if settings.cluster == "mp":
            what = f"NIBBLE_CLUSTER is mp, but the {ranks_here} ranks do not fit this machine"
            action = "set it to the number of machines, on all of them"
            raise NibbleError(ExitCode.USAGE, what=what, expected="NIBBLE_NNODES", action=action)
        if backend is None:
            reason = "HEAD_IP is set and the ranks do not fit this machine"
            return _on_ray(settings, ranks, nodes, gpus_here, reason)
    reason = (
        "all ranks are on this machine"
        if ranks_here == ranks
        else "other replicas are separate servers"
    )
    return Topology("machine", ranks, ranks_here, 1, 0, None, reason)


def replicas_here(values: Mapping[str, Any]) -> int:
    """Data parallel replicas that one server's flags place on its machine (vllm 0.32
    engine/arg_utils.py:2410-2494).
    """
    if "--data-parallel-rank" in values:
        return 1
    replicas = values.get("--data-parallel-size-local") or values.get("--data-parallel-size") or 1
    return max(1, int(replicas))  # vLLM allows 0: a server with only the API


def _on_ray(
    settings: Settings, ranks: int, nodes: int, gpus_here: int | None, reason: str
) -> Topology:
    if nodes > 1:
        what = "NIBBLE_NNODES is set, but the cluster is Ray's"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="one of them",
            action="unset NIBBLE_NNODES or set NIBBLE_CLUSTER=mp",
        )
    if not settings.head_ip:
        what = "serving through Ray needs the head's address"
        raise NibbleError(
            ExitCode.USAGE,
            what=what,
            expected="HEAD_IP",
            action="set HEAD_IP to the address that `ray-head` printed",
        )
    ranks_here = min(ranks, gpus_here) if gpus_here is not None else 1
    return Topology("ray", ranks, ranks_here, None, 0, settings.head_ip, reason)


def _without_ray(settings: Settings, ranks: int, nodes: int, rank: int) -> Topology:
    if not settings.head_ip:
        what = "several machines without Ray need the address of rank 0"
        raise NibbleError(
            ExitCode.USAGE,
            what=what,
            expected="HEAD_IP",
            action="set HEAD_IP to the same address on all of them",
        )
    if rank >= nodes:
        what = f"NIBBLE_NODE_RANK is {rank}, but NIBBLE_NNODES is {nodes}"
        raise NibbleError(
            ExitCode.USAGE,
            what=what,
            expected=f"a rank from 0 to {nodes - 1}",
            action="correct NIBBLE_NODE_RANK",
        )
    if ranks % nodes:
        what = f"{ranks} ranks cannot be divided over {nodes} machines"
        action = "change TENSOR_PARALLEL_SIZE, NIBBLE_PIPELINE_PARALLEL_SIZE or NIBBLE_NNODES"
        raise NibbleError(
            ExitCode.CONFIG, what=what, expected=f"a multiple of {nodes}", action=action
        )
    return Topology(
        "mp", ranks, ranks // nodes, nodes, rank, settings.head_ip, f"NIBBLE_NNODES is {nodes}"
    )


def topology_flags(topology: Topology) -> dict[str, tuple[Any, str]]:
    """vLLM's flags for `topology`: name -> (value, reason)."""
    if topology.mode == "ray":
        return {BACKEND: ("ray", topology.reason)}
    if topology.mode == "machine":
        return {}
    flags: dict[str, tuple[Any, str]] = {
        BACKEND: ("mp", "vLLM's executor for several machines"),
        "--master-addr": (topology.head, "HEAD_IP: the machine of rank 0"),
        "--master-port": (MASTER_PORT, "fixed, so that a firewall can name it"),
    }
    if topology.is_headless:
        flags["--headless"] = (True, f"rank {topology.node_rank} has no API")
    return flags

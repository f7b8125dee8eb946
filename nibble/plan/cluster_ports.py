"""Every port of a cluster, fixed so that a firewall rule can name it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GCS_PORT = 6379
METRICS = "--metrics-export-port"
# Ray would choose these at random (ray 2.60 scripts.py).
NODE_PORTS: Mapping[str, int] = {
    "--node-manager-port": 6380,
    "--object-manager-port": 6381,
    "--runtime-env-agent-port": 6382,
    "--dashboard-agent-grpc-port": 6383,
    "--dashboard-agent-listen-port": 6384,
    METRICS: 6385,
    "--min-worker-port": 20000,
    "--max-worker-port": 20999,
}
# Ports of a Ray node that other nodes connect to. Metrics stay closed.
RAY_PORTS = tuple(
    port for name, port in NODE_PORTS.items() if "worker" not in name and name != METRICS
)
# Ports without a flag: the head's monitor, and the metrics of the disabled dashboard (ray 2.60
# autoscaler/_private/constants.py, dashboard/consts.py).
PORT_VARIABLES: Mapping[str, int] = {"AUTOSCALER_METRIC_PORT": 6386, "DASHBOARD_METRIC_PORT": 6387}
# nibble's agent on every node: facts, checks, heartbeats, model files.
AGENT_PORT = 6388
# torch.distributed's store on rank 0, for vLLM without Ray.
MASTER_PORT = 29501
# The store for the preflight's all-reduce, with and without Ray.
CHECK_PORT = 29502
# The default of --data-parallel-rpc-port, between replicas on several machines (vllm 0.32
# config/parallel.py:160).
DATA_PARALLEL_PORT = 29550
# The kernel chooses the ports of torch.distributed, NCCL and vLLM's message queues from this range.
# A container can set a separate range (docker run --sysctl).
KERNEL_RANGE = "net.ipv4.ip_local_port_range"


def rank_0_ports(values: Mapping[str, Any]) -> list[int]:
    """The ports that vLLM without Ray opens on rank 0, from its flags."""
    ports = [int(values.get("--master-port") or MASTER_PORT)]
    if int(values.get("--data-parallel-size") or 1) > 1:
        ports.append(int(values.get("--data-parallel-rpc-port") or DATA_PARALLEL_PORT))
    return ports


def firewall_rows() -> list[tuple[str, str, str]]:
    """(port or range, who listens, who connects), all TCP."""
    workers = f"{NODE_PORTS['--min-worker-port']}-{NODE_PORTS['--max-worker-port']}"
    node = ", ".join(str(port) for port in RAY_PORTS)
    closed = "none: metrics, without a token; leave closed"
    return [
        (str(AGENT_PORT), "every node", "every node: heartbeats, preflight, model files"),
        (str(GCS_PORT), "Ray head", "Ray nodes"),
        (node, "every Ray node", "Ray nodes"),
        (workers, "every Ray node", "Ray nodes: worker processes"),
        (str(NODE_PORTS[METRICS]), "every Ray node", closed),
        (", ".join(str(port) for port in PORT_VARIABLES.values()), "Ray head", closed),
        (str(MASTER_PORT), "rank 0", "other ranks, without Ray"),
        (
            str(DATA_PARALLEL_PORT),
            "rank 0",
            "other ranks, if data parallel replicas are on several machines",
        ),
        (
            str(CHECK_PORT),
            "head (if it has no GPU: the first node with one)",
            "every node, during the preflight's all-reduce",
        ),
        (KERNEL_RANGE, "every node", "every node: torch.distributed, NCCL, vLLM's queues"),
    ]

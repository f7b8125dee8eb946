"""The command line and environment of `ray start`. Pure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from nibble.cluster.node import Place
from nibble.cluster.token import SECRETS
from nibble.engine.contract import REPORT_FOLDER
from nibble.plan.cluster_ports import GCS_PORT, NODE_PORTS, PORT_VARIABLES

# vLLM moves no tensors through the object store; Ray's default is 30 % of memory.
OBJECT_STORE_BYTES = 256 << 20


def head_flags(address: str, gpus: int | None) -> list[str]:
    """Flags of `ray start` for a head. `gpus` None: Ray counts them."""
    ours = ["--head", f"--port={GCS_PORT}", "--include-dashboard=false"]
    return [*ours, *_node_flags(address, gpus)]


def worker_flags(head: str, address: str, gpus: int | None) -> list[str]:
    """Flags of `ray start` for a worker; `head` is ADDRESS:PORT."""
    return [f"--address={head}", *_node_flags(address, gpus)]


def _node_flags(address: str, gpus: int | None) -> list[str]:
    ports = [f"{name}={port}" for name, port in NODE_PORTS.items()]
    offered = [] if gpus is None else [f"--num-gpus={gpus}"]
    common = ["--disable-usage-stats", f"--object-store-memory={OBJECT_STORE_BYTES}", "--block"]
    return [f"--node-ip-address={address}", *ports, *offered, *common]


def ray_command(flags: Sequence[str]) -> list[str]:
    """The command line of `ray start` in this interpreter, without Ray's client server."""
    return [sys.executable, "-P", "-m", "nibble.cluster.ray_start", "start", *flags]


def node_environ(place: Place, token: str, proof: Path) -> dict[str, str]:
    """The environment of Ray and of every process that Ray starts.

    It has the cluster's token, this node's network variables and the folder for workers' reports.
    It does not have the API key or the Hub's token. A variable of the server does not replace one
    that a worker has from here (vllm 0.32 v1/executor/ray_executor_v2.py:175).
    """
    withheld = SECRETS | {"RAY_AUTH_TOKEN_FILE", "RAY_AUTH_TOKEN_PATH", "VLLM_EXTRA_ARGS"}
    kept = {name: value for name, value in place.environ.items() if name not in withheld}
    added = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}
    ports = {name: str(port) for name, port in PORT_VARIABLES.items()}
    own = {"PYTHONUNBUFFERED": "1", "VLLM_HOST_IP": place.address, REPORT_FOLDER: str(proof)}
    # Ray's memory monitor kills a worker at 95 % of the machine's memory. On unified memory a plan
    # may use that much.
    monitor = {"RAY_memory_monitor_refresh_ms": "0"}
    return ports | monitor | kept | added | own

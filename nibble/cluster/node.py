"""What every node's agent answers, whatever the node is for: facts, reachability, its part of an all-reduce."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nibble.cluster.agent import Handler
from nibble.cluster.allreduce import TIMEOUT_S
from nibble.cluster.facts import collect, model_state
from nibble.cluster.network import find_interface, network_environ, node_address, rdma_devices
from nibble.settings import Settings

REACH_S = 3.0


@dataclass(frozen=True)
class Place:
    """This node in the network. A network that was away may come back as another interface, so that is looked for each time.

    `asked_interface` is the user's (None: the one that has `address`), `given` the user's environment.
    """

    address: str
    asked_interface: str | None
    given: Mapping[str, str]

    @property
    def interface(self) -> str:
        """Of the cluster's traffic now. Raises CLUSTER where none has `address`."""
        return find_interface(self.asked_interface, self.address)

    @property
    def environ(self) -> dict[str, str]:
        """What vLLM, Gloo and NCCL need here now; the user's own values win."""
        chosen = network_environ(self.address, self.interface, rdma_devices(self.address))
        return {**chosen, **self.given}

    def facts(self) -> dict[str, Any]:
        return collect(self.address, self.interface, self.environ)


def find_place(settings: Settings, environ: Mapping[str, str], head: str | None) -> Place:
    """`head` is its address, None on the head itself. Raises CLUSTER where this node has no usable address."""
    address = node_address(settings, head)
    find_interface(settings.cluster_interface, address)
    return Place(address, settings.cluster_interface, environ)


def node_handlers(place: Place) -> dict[str, Handler]:
    """The paths that every node has."""

    def facts(body: Mapping[str, Any]) -> dict[str, Any]:
        return place.facts() | {"models": {one: model_state(one) for one in body.get("models") or ()}}

    def reach(body: Mapping[str, Any]) -> dict[str, Any]:
        return {"unreachable": unreachable([(str(host), int(port)) for host, port in body["targets"]])}

    def reduce(body: Mapping[str, Any]) -> dict[str, Any]:
        return all_reduce(place, int(body["rank"]), int(body["world"]), str(body["head"]), int(body["port"]))

    return {"/facts": facts, "/reach": reach, "/allreduce": reduce}


def unreachable(targets: list[tuple[str, int]]) -> list[str]:
    """Those of `targets` that take no TCP connection, with why."""
    found = []
    for host, port in targets:
        try:
            socket.create_connection((host, port), timeout=REACH_S).close()
        except OSError as error:
            found.append(f"{host}:{port} ({error.strerror or error})")
    return found


def all_reduce(place: Place, rank: int, world: int, head: str, port: int) -> dict[str, Any]:
    """This node's rank, in a process of its own; {"error": …} where it failed."""
    words = [sys.executable, "-P", "-m", "nibble.cluster.allreduce", str(rank), str(world), head, str(port)]
    try:
        done = subprocess.run(
            words,
            env=dict(place.environ),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S + 30,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"nothing came of it within {TIMEOUT_S + 30} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    errors = [line for line in done.stderr.splitlines() if "Error" in line]
    return {"error": (errors or done.stderr.strip().splitlines() or ["no message"])[-1].strip()[:300]}

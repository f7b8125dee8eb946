"""What every node's agent answers: facts, reachability, a rank of the all-reduce."""

from __future__ import annotations

import contextlib
import errno
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nibble.canary.verification import read_reports
from nibble.cluster.agent import Handler
from nibble.cluster.allreduce import TIMEOUT_S
from nibble.cluster.checkpoint_facts import checkpoint_facts, summary
from nibble.cluster.facts import collect, hub_state, model_state
from nibble.cluster.network import find_interface, network_environ, node_address, rdma_devices
from nibble.cluster.rank_settings import checkpoint_folders, rank_facts
from nibble.engine.contract.report import WORKER_REPORTS, WorkerReport, reporting_pid
from nibble.engine.installed import part_files
from nibble.machine.paths import cache_dir
from nibble.settings.options import Settings

if TYPE_CHECKING:
    from nibble.plan.plan import Plan

REACH_S = 3.0
_RETRY_S = 0.1


@dataclass(frozen=True)
class Place:
    """This node in the network. The interface is looked up each time: after an outage the network
    may return as another interface.

    `asked_interface` is the user's choice (None: the one that has `address`), `given` the user's
    environment, `cache` nibble's cache folder on this machine.
    """

    address: str
    asked_interface: str | None
    given: Mapping[str, str]
    cache: Path

    @property
    def interface(self) -> str:
        """The interface of the cluster's traffic now. Raises CLUSTER if no interface has
        `address`.
        """
        return find_interface(self.asked_interface, self.address)

    @property
    def environ(self) -> dict[str, str]:
        """The variables that vLLM, Gloo and NCCL need now. The user's values win."""
        chosen = network_environ(self.address, self.interface, rdma_devices(self.address))
        return {**chosen, **self.given}

    def facts(self) -> dict[str, Any]:
        """The facts of this node; see `facts.collect`."""
        return collect(self.address, self.interface, self.environ, self.cache)


def find_place(settings: Settings, environ: Mapping[str, str], head: str | None) -> Place:
    """This node's place in the cluster. `head` is the head's address, None on the head. Raises
    CLUSTER if this node has no usable address.
    """
    address = node_address(settings, head)
    find_interface(settings.cluster_interface, address)
    return Place(
        address, settings.cluster_interface, environ, settings.cache_dir or cache_dir(environ)
    )


def node_handlers(place: Place, plan: Plan | None = None) -> dict[str, Handler]:
    """The agent's paths that every node has. A rank passes its `plan`; a Ray node has none."""

    def facts(body: Mapping[str, Any]) -> dict[str, Any]:
        rank = rank_facts(plan, plan.vllm_environ(place.environ)) if plan else {}
        models = {folder: model_state(folder) for folder in body.get("models") or ()}
        if hub := body.get("hub"):
            models[str(hub["model"])] = hub_state(str(hub["model"]), hub["revision"], place.given)
        return place.facts() | rank | {"models": models}

    def checkpoints(body: Mapping[str, Any]) -> dict[str, Any]:
        requested = {str(folder): str(folder) for folder in body.get("folders") or ()}
        folders = requested or (checkpoint_folders(plan) if plan else {})
        return {"checkpoints": {label: summary(folder) for label, folder in folders.items()}}

    def entries(body: Mapping[str, Any]) -> dict[str, Any]:
        """What a digest of /facts ("part") or /checkpoints ("folder") covers."""
        if folder := body.get("folder"):
            return {"entries": checkpoint_facts(str(folder))}
        return {"entries": dict(part_files(str(body["part"])))}

    def reach(body: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "unreachable": unreachable([(str(host), int(port)) for host, port in body["targets"]])
        }

    rank_process = LatestProcess()

    def reduce(body: Mapping[str, Any]) -> dict[str, Any]:
        rank, world, port = (str(int(body[name])) for name in ("rank", "world", "port"))
        return all_reduce(place, rank_process, [rank, world, str(body["head"]), port])

    listening: list[socket.socket] = []
    one_at_a_time = threading.Lock()

    def listen(body: Mapping[str, Any]) -> dict[str, Any]:
        with one_at_a_time:
            while listening:
                listening.pop().close()
            sockets, taken = listen_on(place.address, [int(port) for port in body["ports"]])
            listening.extend(sockets)
        return {"taken": taken}

    return {
        "/facts": facts,
        "/checkpoints": checkpoints,
        "/entries": entries,
        "/reach": reach,
        "/listen": listen,
        "/allreduce": reduce,
    }


def proof_handlers(folder: Path) -> dict[str, Handler]:
    """The agent's path for workers' reports, which the server on another node verifies."""

    def proof(body: Mapping[str, Any]) -> dict[str, Any]:
        alive = {
            pid: rank for pid, rank in ranks_by_pid(folder).items() if Path(f"/proc/{pid}").exists()
        }
        return {"reports": read_reports(folder, of_the_living=True), "ranks": alive}

    return {"/proof": proof}


def ranks_by_pid(folder: Path) -> dict[int, int]:
    """The model's rank of each worker that wrote a report into `folder`, also of workers that have
    ended.
    """
    ranks: dict[int, int] = {}
    for file in folder.glob(WORKER_REPORTS):
        with contextlib.suppress(OSError, ValueError, KeyError):
            report: WorkerReport = json.loads(file.read_text())
            ranks[int(reporting_pid(file))] = int(report["rank"])
    return ranks


def listen_on(address: str, ports: list[int]) -> tuple[list[socket.socket], list[int]]:
    """(sockets that listen on `ports`, the ports that other programs use)."""
    sockets: list[socket.socket] = []
    taken: list[int] = []
    for port in ports:
        try:
            sockets.append(socket.create_server((address, port)))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            taken.append(port)
    return sockets, taken


def unreachable(targets: list[tuple[str, int]]) -> list[str]:
    """The targets that accept no TCP connection, each with its error. A refused connection is tried
    again for REACH_S, because Ray's agents start late.
    """
    failed = []
    deadline = time.monotonic() + REACH_S
    for host, port in targets:
        error = _connection_error(host, port)
        while isinstance(error, ConnectionRefusedError) and time.monotonic() < deadline:
            time.sleep(_RETRY_S)
            error = _connection_error(host, port)
        if error:
            failed.append(f"{host}:{port} ({error.strerror or error})")
    return failed


def _connection_error(host: str, port: int) -> OSError | None:
    try:
        socket.create_connection((host, port), timeout=REACH_S).close()
    except OSError as error:
        return error
    return None


class LatestProcess:
    """Runs one process at a time. A new one kills the one before: its caller has gone, and it would
    connect to the new one's peers.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start `command`; kills the process before."""
        with self._lock:
            if self._child is not None:
                self._child.kill()
            pipe = subprocess.PIPE
            self._child = subprocess.Popen(
                command, env=dict(environ), stdout=pipe, stderr=pipe, text=True
            )
            return self._child


def all_reduce(place: Place, runner: LatestProcess, arguments: Sequence[str]) -> dict[str, Any]:
    """Run this node's rank in a separate process; {"error": …} if it failed. `arguments` are those
    of nibble.cluster.allreduce.
    """
    command = [sys.executable, "-P", "-m", "nibble.cluster.allreduce", *arguments]
    child = runner.start(command, place.environ)
    try:
        out, err = child.communicate(timeout=TIMEOUT_S + 30)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return {"error": f"no result within {TIMEOUT_S + 30} s"}
    lines = out.strip().splitlines()
    if child.returncode == 0 and lines:
        return json.loads(lines[-1])
    if child.returncode == -signal.SIGKILL:
        return {"error": "this node killed it, for another check or for lack of memory"}
    errors = [line for line in err.splitlines() if "Error" in line]
    return {"error": (errors or err.strip().splitlines() or ["no message"])[-1].strip()[:300]}

"""The answers of every node's agent: facts, reachability, its part of an all-reduce."""

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
from nibble.engine.contract import WORKER_REPORTS, WorkerReport, reporting_pid
from nibble.engine.installed import part_files
from nibble.machine.paths import cache_dir
from nibble.settings.options import Settings

if TYPE_CHECKING:
    from nibble.plan.plan import Plan

REACH_S = 3.0
_AGAIN_S = 0.1


@dataclass(frozen=True)
class Place:
    """This node in the network. A network that was away may come back as another interface, so that
    is looked for each time.

    `asked_interface` is the user's (None: the one that has `address`), `given` the user's
    environment, `cache` nibble's cache folder here.
    """

    address: str
    asked_interface: str | None
    given: Mapping[str, str]
    cache: Path

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
        return collect(self.address, self.interface, self.environ, self.cache)


def find_place(settings: Settings, environ: Mapping[str, str], head: str | None) -> Place:
    """`head` is its address, None on the head itself. Raises CLUSTER where this node has no
    usable address.
    """
    address = node_address(settings, head)
    find_interface(settings.cluster_interface, address)
    return Place(
        address, settings.cluster_interface, environ, settings.cache_dir or cache_dir(environ)
    )


def node_handlers(place: Place, plan: Plan | None = None) -> dict[str, Handler]:
    """The paths that every node has. `plan` is a rank's own; a Ray node has none."""

    def facts(body: Mapping[str, Any]) -> dict[str, Any]:
        own = rank_facts(plan, plan.vllm_environ(place.environ)) if plan else {}
        models = {one: model_state(one) for one in body.get("models") or ()}
        if asked := body.get("hub"):
            models[str(asked["model"])] = hub_state(
                str(asked["model"]), asked["revision"], place.given
            )
        return place.facts() | own | {"models": models}

    def checkpoints(body: Mapping[str, Any]) -> dict[str, Any]:
        asked = {str(folder): str(folder) for folder in body.get("folders") or ()}
        own = checkpoint_folders(plan) if plan else {}
        return {"checkpoints": {label: summary(folder) for label, folder in (asked or own).items()}}

    def entries(body: Mapping[str, Any]) -> dict[str, Any]:
        """What a digest of /facts ("part") or /checkpoints ("folder") is made of."""
        if folder := body.get("folder"):
            return {"entries": checkpoint_facts(str(folder))}
        return {"entries": dict(part_files(str(body["part"])))}

    def reach(body: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "unreachable": unreachable([(str(host), int(port)) for host, port in body["targets"]])
        }

    rank_here = OneAtATime()

    def reduce(body: Mapping[str, Any]) -> dict[str, Any]:
        words = (str(int(body[name])) for name in ("rank", "world"))
        return all_reduce(place, rank_here, [*words, str(body["head"]), str(int(body["port"]))])

    listening: list[socket.socket] = []
    one_at_a_time = threading.Lock()

    def listen(body: Mapping[str, Any]) -> dict[str, Any]:
        with one_at_a_time:
            while listening:
                listening.pop().close()
            found, taken = listen_on(place.address, [int(port) for port in body["ports"]])
            listening.extend(found)
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
    """The path of a node whose workers' reports are judged by the server on another one."""

    def proof(body: Mapping[str, Any]) -> dict[str, Any]:
        alive = {
            pid: rank for pid, rank in ranks_by_pid(folder).items() if Path(f"/proc/{pid}").exists()
        }
        return {"reports": read_reports(folder, of_the_living=True), "ranks": alive}

    return {"/proof": proof}


def ranks_by_pid(folder: Path) -> dict[int, int]:
    """Which rank of the model each worker had that wrote a report into `folder`, whether it
    still runs or not.
    """
    found: dict[int, int] = {}
    for file in folder.glob(WORKER_REPORTS):
        with contextlib.suppress(OSError, ValueError, KeyError):
            report: WorkerReport = json.loads(file.read_text())
            found[int(reporting_pid(file))] = int(report["rank"])
    return found


def listen_on(address: str, ports: list[int]) -> tuple[list[socket.socket], list[int]]:
    """(sockets that take connections on `ports`, those of `ports` that other programs use)."""
    found: list[socket.socket] = []
    taken: list[int] = []
    for port in ports:
        try:
            found.append(socket.create_server((address, port)))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            taken.append(port)
    return found, taken


def unreachable(targets: list[tuple[str, int]]) -> list[str]:
    """Those of `targets` that take no TCP connection, with why. One that is refused is tried
    again: Ray's agents start late.
    """
    found = []
    deadline = time.monotonic() + REACH_S
    for host, port in targets:
        error = _knock(host, port)
        while isinstance(error, ConnectionRefusedError) and time.monotonic() < deadline:
            time.sleep(_AGAIN_S)
            error = _knock(host, port)
        if error:
            found.append(f"{host}:{port} ({error.strerror or error})")
    return found


def _knock(host: str, port: int) -> OSError | None:
    try:
        socket.create_connection((host, port), timeout=REACH_S).close()
    except OSError as error:
        return error
    return None


class OneAtATime:
    """A process of which only the last one runs: the caller of the one before has gone, and
    that process would meet the new one's partners.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
        with self._lock:
            if self._child is not None:
                self._child.kill()
            out = subprocess.PIPE
            self._child = subprocess.Popen(
                command, env=dict(environ), stdout=out, stderr=out, text=True
            )
            return self._child


def all_reduce(place: Place, here: OneAtATime, words: Sequence[str]) -> dict[str, Any]:
    """This node's rank, in a separate process; {"error": …} where it failed. `words` are those
    of nibble.cluster.allreduce.
    """
    command = [sys.executable, "-P", "-m", "nibble.cluster.allreduce", *words]
    child = here.start(command, place.environ)
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
        return {"error": "this node ended it, for another check or out of memory"}
    errors = [line for line in err.splitlines() if "Error" in line]
    return {"error": (errors or err.strip().splitlines() or ["no message"])[-1].strip()[:300]}

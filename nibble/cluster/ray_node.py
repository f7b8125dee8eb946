"""`ray-head` and `ray-worker`: one Ray node in the foreground, with a token and fixed ports.

A client that reaches an open Ray port can run code on the machine (CVE-2023-48022). Ray 2.60
requires a token only with RAY_AUTH_MODE=token, so nibble sets it on every node. A token does not
encrypt: keep these ports private.
"""

from __future__ import annotations

import secrets
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

from nibble.cluster.agent import Agent
from nibble.cluster.facts import target_of
from nibble.cluster.head import head_handlers, leaving, lost_head, refuse, running
from nibble.cluster.member import Member
from nibble.cluster.model_copies import Copies
from nibble.cluster.network import is_here, resolve
from nibble.cluster.node import find_place, node_handlers, proof_handlers
from nibble.cluster.ray_command import head_flags, node_environ, ray_command, worker_flags
from nibble.cluster.ray_failure import unreachable
from nibble.cluster.ray_process import RayProcess
from nibble.cluster.ray_workers import RayWorkers
from nibble.cluster.roster import Roster
from nibble.cluster.token import heads_token, members_token
from nibble.errors import ExitCode, NibbleError
from nibble.machine.hardware import detect
from nibble.machine.processes import survive_memory_pressure
from nibble.machine.targets import load_target
from nibble.plan.budget import GIB, host_reserve_bytes
from nibble.plan.cluster_ports import GCS_PORT
from nibble.plan.memory import Limits, limits
from nibble.settings.options import Settings


def ray_head(settings: Settings, environ: Mapping[str, str]) -> int:
    """Run a head node until a stop signal (0), or until Ray ends by itself (10).

    Raises CLUSTER (9) if Ray does not start, CONFIG (5) if NUM_GPUS is more than the machine has,
    NO_FIT (7) if memory runs short.
    """
    if settings.head_ip and not is_here(resolve(settings.head_ip, "HEAD_IP")):
        what = f"HEAD_IP {settings.head_ip} is not an address of this machine"
        action = "run `ray-worker` here, or set HEAD_IP to this machine's address"
        raise NibbleError(
            ExitCode.CLUSTER, what=what, expected="one head in a cluster", action=action
        )
    gpus = _gpus(settings, environ)
    token, where = heads_token(settings, environ)
    place = find_place(settings, environ, None)
    address = place.address
    roster = Roster(secrets.token_hex(8))
    up = [
        f"Ray head is up at {address}:{GCS_PORT} ({place.interface})",
        f"token: {where}",
        f"workers: HEAD_IP={address} ./entrypoint.sh ray-worker",
    ]
    copies = Copies(token, environ, settings.cache_dir)
    with _proof_folder() as folder:
        proof = Path(folder)
        handlers = head_handlers(roster) | node_handlers(place) | copies.handlers()
        handlers |= proof_handlers(proof)
        agent = Agent(address, token, handlers, copies.senders(), environ)
        member = Member(address, token, address, "ray-head", None, gpus, environ, place.facts)
        survive_memory_pressure()
        with running(agent), leaving(member):
            return RayProcess(
                ray_command(head_flags(address, settings.num_gpus)),
                node_environ(place, token, proof),
                "head",
                f"{address}:{GCS_PORT}",
                up,
                member.start,
                RayWorkers(member, proof),
                limit=memory_limits(settings, environ),
                roster=roster,
            ).run()


def ray_worker(settings: Settings, environ: Mapping[str, str]) -> int:
    """Join the cluster of HEAD_IP until a stop signal (0), or until Ray ends by itself or the head
    is lost (10).

    Raises USAGE (2) if HEAD_IP or the token is missing, CONFIG (5) if NUM_GPUS is more than the
    machine has, CLUSTER (9) if the head refuses this node, NO_FIT (7) if memory runs short.
    """
    if not settings.head_ip:
        raise NibbleError(
            ExitCode.USAGE,
            what="a Ray worker needs the head's address",
            expected="HEAD_IP",
            action="set HEAD_IP to the address that `ray-head` printed",
        )
    token, gpus = members_token(settings, environ, "a Ray worker"), _gpus(settings, environ)
    place = find_place(settings, environ, settings.head_ip)
    address, head = place.address, f"{settings.head_ip}:{GCS_PORT}"
    require_head(settings.head_ip)
    member = Member(
        settings.head_ip, token, address, "ray-worker", None, gpus, environ, place.facts
    )
    member.greet()
    refuse(member)
    copies = Copies(token, environ, settings.cache_dir)
    with _proof_folder() as folder:
        proof = Path(folder)
        handlers = node_handlers(place) | copies.handlers() | proof_handlers(proof)
        agent = Agent(address, token, handlers, copies.senders(), environ)
        survive_memory_pressure()
        with running(agent), leaving(member):
            return RayProcess(
                ray_command(worker_flags(head, address, settings.num_gpus)),
                node_environ(place, token, proof),
                "worker",
                head,
                [f"Ray worker {address} ({place.interface}) has joined {head}"],
                member.start,
                RayWorkers(member, proof),
                lambda: lost_head(member),
                memory_limits(settings, environ),
            ).run()


def _gpus(settings: Settings, environ: Mapping[str, str]) -> int:
    """How many GPUs this node offers: NUM_GPUS, else all.

    Raises CONFIG if NUM_GPUS is more than the machine has: Ray does not check the number, and
    vLLM's ranks would not find their GPUs.
    """
    gpus_here = len(detect(environ).gpus)
    if gpus_here and settings.num_gpus is not None and settings.num_gpus > gpus_here:
        what = f"NUM_GPUS is {settings.num_gpus}, but this machine has {gpus_here} GPUs"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected=f"at most {gpus_here}",
            action="correct or unset NUM_GPUS",
        )
    return gpus_here if settings.num_gpus is None else settings.num_gpus


def _proof_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for the reports of this node's workers."""
    return tempfile.TemporaryDirectory(prefix="nibble-proof-", ignore_cleanup_errors=True)


def memory_limits(settings: Settings, environ: Mapping[str, str]) -> Limits:
    """The limits of this node's watchdog. They equal those of a plan, which a Ray node lacks."""
    hardware, reserve_gib = detect(environ), settings.memory_reserve_gib
    target = target_of(hardware) if settings.target == "auto" else load_target(settings.target)
    reserve_bytes = None if reserve_gib is None else int(reserve_gib * GIB)
    total_bytes = hardware.memory_total_bytes
    return limits(host_reserve_bytes(target or load_target("cpu"), total_bytes, reserve_bytes))


def require_head(host: str, timeout_s: float = 10.0) -> None:
    """Raise CLUSTER if nothing listens on the head's port. Ray would try for minutes."""
    try:
        socket.create_connection((host, GCS_PORT), timeout=timeout_s).close()
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise unreachable(f"{host}:{GCS_PORT}", why) from None

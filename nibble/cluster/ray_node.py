"""One node of a Ray cluster in the foreground, with a token, named ports and no dashboard.

A client that reaches an open Ray port can run code on the machine (CVE-2023-48022). Ray 2.60 asks
for a token only with RAY_AUTH_MODE=token, so nibble sets it on every node. A token does not
encrypt: keep these ports private.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nibble.cluster.agent import Agent
from nibble.cluster.facts import target_of
from nibble.cluster.head import head_handlers, leaving, lost_head, refuse, running
from nibble.cluster.member import Member
from nibble.cluster.model_copies import Copies
from nibble.cluster.network import is_here, resolve
from nibble.cluster.node import Place, find_place, node_handlers, proof_handlers
from nibble.cluster.parts import Parts
from nibble.cluster.roster import STOPPING, Roster
from nibble.cluster.token import SECRETS, heads_token, members_token
from nibble.engine.contract import REPORT_FOLDER
from nibble.errors import ExitCode, NibbleError
from nibble.machine.hardware import detect
from nibble.machine.memory import MemorySource
from nibble.machine.process_table import family, is_resource_tracker, kill_family
from nibble.machine.processes import (
    become_subreaper,
    die_with_parent,
    signal_name,
    stop_signals,
    survive_memory_pressure,
)
from nibble.machine.targets import load_target
from nibble.plan.budget import GIB, host_reserve_bytes
from nibble.plan.cluster_ports import GCS_PORT, NODE_PORTS, PORT_VARIABLES
from nibble.plan.memory import UNWATCHED, Limits, limits, show_gib
from nibble.serve.failures import kept
from nibble.serve.progress import Display
from nibble.serve.watchdog import Action, Governor
from nibble.settings.options import Settings

# vLLM moves no tensors through it; Ray's own default is 30 % of memory
OBJECT_STORE_BYTES = 256 << 20
START_S = 180.0  # a start takes seconds; nibble reports a longer one
STOP_S = 10.0
WATCH_S = 2.0
DRAIN_LOOK_S = 0.2
_STARTED = "Ray runtime started."
_KEPT_LINES = 400
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def ray_head(settings: Settings, environ: Mapping[str, str]) -> int:
    """Run a head node until a stop (0).

    Raises CLUSTER (9) where Ray does not start, CONFIG (5) for more GPUs than are here, NO_FIT (7)
    where memory runs short here; 10 when it dies later.
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
    proof = _proof_folder()
    handlers = head_handlers(roster) | node_handlers(place) | copies.handlers()
    handlers |= proof_handlers(Path(proof.name))
    agent = Agent(address, token, handlers, copies.senders(), environ)
    member = Member(address, token, address, "ray-head", None, gpus, environ, place.facts)
    survive_memory_pressure()
    with proof, running(agent), leaving(member):
        command = ray_command(head_flags(address, settings.num_gpus))
        head, limit = f"{address}:{GCS_PORT}", memory_limits(settings, environ)
        own = node_environ(place, token, Path(proof.name))
        parts = Parts(member, Path(proof.name))
        return _Node(
            command, own, "head", head, up, member.start, parts, limit=limit, roster=roster
        ).run()


def ray_worker(settings: Settings, environ: Mapping[str, str]) -> int:
    """Join the cluster of HEAD_IP until a stop (0); 10 when Ray dies or the head is lost.

    Raises USAGE (2) where HEAD_IP or the token is missing, CONFIG (5) for more GPUs than are here,
    CLUSTER (9) where the head does not take this node, NO_FIT (7) where memory runs short here.
    """
    if not settings.head_ip:
        what = "a Ray worker needs the head's address"
        raise NibbleError(
            ExitCode.USAGE,
            what=what,
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
    proof = _proof_folder()
    handlers = node_handlers(place) | copies.handlers() | proof_handlers(Path(proof.name))
    agent = Agent(address, token, handlers, copies.senders(), environ)
    survive_memory_pressure()
    with proof, running(agent), leaving(member):
        command = ray_command(worker_flags(head, address, settings.num_gpus))
        up = [f"Ray worker {address} ({place.interface}) has joined {head}"]
        own, limit = node_environ(place, token, Path(proof.name)), memory_limits(settings, environ)
        parts = Parts(member, Path(proof.name))
        return _Node(
            command, own, "worker", head, up, member.start, parts, lambda: lost_head(member), limit
        ).run()


def _gpus(settings: Settings, environ: Mapping[str, str]) -> int:
    """How many this node offers. Raises CONFIG for more than it has: Ray believes it, and vLLM's
    ranks would find none.
    """
    here = len(detect(environ).gpus)
    if here and settings.num_gpus is not None and settings.num_gpus > here:
        what = f"NUM_GPUS is {settings.num_gpus}, but this machine has {here} GPUs"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected=f"at most {here}",
            action="correct or unset NUM_GPUS",
        )
    return here if settings.num_gpus is None else settings.num_gpus


def _proof_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="nibble-proof-", ignore_cleanup_errors=True)


def memory_limits(settings: Settings, environ: Mapping[str, str]) -> Limits:
    """Where this node's watchdog acts: as a plan's, without a plan."""
    here, asked = detect(environ), settings.memory_reserve_gib
    target = target_of(here) if settings.target == "auto" else load_target(settings.target)
    asked_bytes = None if asked is None else int(asked * GIB)
    return limits(
        host_reserve_bytes(target or load_target("cpu"), here.memory_total_bytes, asked_bytes)
    )


# --- decisions ---


def head_flags(address: str, gpus: int | None) -> list[str]:
    """Words after `ray start` for a head."""
    return [
        "--head",
        f"--port={GCS_PORT}",
        "--include-dashboard=false",
        *_node_flags(address, gpus),
    ]


def worker_flags(head: str, address: str, gpus: int | None) -> list[str]:
    """Words after `ray start` for a worker; `head` is ADDRESS:PORT."""
    return [f"--address={head}", *_node_flags(address, gpus)]


def _node_flags(address: str, gpus: int | None) -> list[str]:
    ports = [f"{name}={port}" for name, port in NODE_PORTS.items()]
    offered = [] if gpus is None else [f"--num-gpus={gpus}"]
    common = ["--disable-usage-stats", f"--object-store-memory={OBJECT_STORE_BYTES}", "--block"]
    return [f"--node-ip-address={address}", *ports, *offered, *common]


def ray_command(flags: Sequence[str]) -> list[str]:
    """The command line of `ray start` in this interpreter, without the client server."""
    return [sys.executable, "-P", "-m", "nibble.cluster.ray_start", "start", *flags]


def node_environ(place: Place, token: str, proof: Path) -> dict[str, str]:
    """The environment of Ray and of every process it starts:

    with the cluster's token, this node's network and its folder for what workers prove, without the
    API's key and the Hub's token. What the server has too does not replace it in a worker (vllm
    0.32 v1/executor/ray_executor_v2.py:175).
    """
    withheld = SECRETS | {"RAY_AUTH_TOKEN_FILE", "RAY_AUTH_TOKEN_PATH", "VLLM_EXTRA_ARGS"}
    kept = {name: value for name, value in place.environ.items() if name not in withheld}
    added = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}
    ports = {name: str(port) for name, port in PORT_VARIABLES.items()}
    own = {"PYTHONUNBUFFERED": "1", "VLLM_HOST_IP": place.address, REPORT_FOLDER: str(proof)}
    # Ray's own would kill a worker at 95 % of a machine's memory, which on unified memory is what a
    # plan may take.
    monitor = {"RAY_memory_monitor_refresh_ms": "0"}
    return ports | monitor | kept | added | own


def explain_failure(lines: Iterable[str], role: str, head: str) -> NibbleError:
    """One line for Ray's tracebacks. `head` is ADDRESS:PORT."""
    lines = list(lines)
    text = "\n".join(lines)
    if re.search(r"AuthenticationError|InvalidAuthToken|Unauthenticated|UNAUTHENTICATED", text):
        what = f"the Ray head at {head} refused this node's token"
        return NibbleError(
            ExitCode.CLUSTER,
            what=what,
            expected="the head's token",
            action="set RAY_AUTH_TOKEN_FILE to a copy of the head's file",
        )
    if re.search(r"already running at|Address already in use|already in use|EADDRINUSE", text):
        what = f"Ray cannot open its ports for {head}: another program uses one"
        return NibbleError(
            ExitCode.CLUSTER,
            what=what,
            expected="free ports",
            action="stop the other Ray node on this machine (`ray stop`)",
        )
    if role == "worker" and re.search(
        r"[Ff]ailed to connect|[Uu]nable to connect|[Tt]imed? ?out|ConnectionError", text
    ):
        return _unreachable(head)
    errors = [
        line.strip() for line in lines if re.match(r"\s*(?:[\w.]+)?(?:Error|Exception)\b.*: ", line)
    ]
    last = (
        errors[-1]
        if errors
        else next((line for line in reversed(lines) if line.strip()), "no message")
    )
    return NibbleError(
        ExitCode.CLUSTER,
        what=f"Ray did not start: {last[:300]}",
        action="run again with NIBBLE_DEBUG=1 to see its whole output",
    )


def _unreachable(head: str, why: str = "") -> NibbleError:
    what = f"no Ray head answers at {head}" + (f" ({why})" if why else "")
    return NibbleError(
        ExitCode.CLUSTER,
        what=what,
        expected="a running `ray-head`",
        action="check HEAD_IP and the firewall between the nodes",
    )


# --- the head ---


def require_head(host: str, timeout_s: float = 10.0) -> None:
    """Raises CLUSTER where nothing listens: Ray itself would try for minutes."""
    try:
        socket.create_connection((host, GCS_PORT), timeout=timeout_s).close()
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise _unreachable(f"{host}:{GCS_PORT}", why) from None


# --- the process ---


@dataclass
class _Node:
    """`ray start --block` as our child: its chatter is kept back until it is up, then passed on."""

    command: list[str]
    environ: Mapping[str, str]
    role: str
    head: str
    up: Sequence[str]
    on_up: Callable[[], object] = lambda: None
    parts: Parts | None = None
    lost: Callable[[], str | None] = lambda: None
    limit: Limits = UNWATCHED
    roster: Roster | None = None
    _doomed: tuple[int, ...] = ()
    _events: queue.SimpleQueue[int | str | NibbleError] = field(default_factory=queue.SimpleQueue)
    _lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    _is_up: bool = False
    _display: Display = field(default_factory=lambda: Display(silence=lambda: 0.0, live=False))

    def run(self) -> int:
        """Until Ray ends or a signal comes; nothing of Ray is left afterwards."""
        become_subreaper()
        with stop_signals(lambda signum: self._events.put(signal_name(signum))):
            child = subprocess.Popen(
                self.command,
                env=dict(self.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509 - see above
            )
            reader = threading.Thread(target=self._read, args=(child,), daemon=True)
            reader.start()
            threading.Thread(target=lambda: self._events.put(child.wait()), daemon=True).start()
            self._doomed = (child.pid,)
            governor = Governor(MemorySource(), self.limit, self._on_memory)
            threading.Thread(target=governor.run, daemon=True).start()
            over = threading.Event()
            if (parts := self.parts) is not None:
                watch = threading.Thread(
                    target=lambda: parts.watch(child.pid, governor, over), daemon=True
                )
                watch.start()
            try:
                return self._wait(child, reader)
            finally:
                over.set()
                governor.close()
                kill_family(child.pid)

    def _on_memory(self, action: Action, why: str) -> None:
        """In the watchdog's thread: nothing here may wait. `run` ends what was started since the
        last look.
        """
        if action == "stop":
            what = f"stopped Ray and vLLM's part on this node: {why}, {kept(self.limit)}"
            expected = f"at least {show_gib(self.limit.stop_below_bytes)}"
            advice = "serve with less memory (`nibble plan`), or end other programs on this node"
            self._events.put(
                NibbleError(ExitCode.NO_FIT, what=what, expected=expected, action=advice)
            )
            for pid in self._doomed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _wait(self, child: subprocess.Popen[bytes], reader: threading.Thread) -> int:
        event = self._next(child.pid)
        if isinstance(event, NibbleError):
            raise event
        if isinstance(event, str):
            self._let_servers_drain(event)
            self._display.say(f"{event}: stopping Ray")
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)
            with contextlib.suppress(queue.Empty):  # its end, or a second signal
                self._events.get(timeout=STOP_S)
            return ExitCode.OK
        if event is None and not self._is_up:
            what = f"Ray has not started within {START_S:.0f} s"
            action = "check that the head answers, and run again with NIBBLE_DEBUG=1"
            raise NibbleError(ExitCode.CLUSTER, what=what, action=action)
        reader.join(timeout=2)
        if not self._is_up:
            raise explain_failure(self._lines, self.role, self.head)
        if why := self.lost():
            self._display.say(f"{why}: stopping Ray")
            return ExitCode.ENGINE_DIED
        how = (
            f"exit code {event}{_last_words(self._lines)}"
            if event is not None
            else "its node process ended"
        )
        self._display.say(f"Ray ended by itself ({how})")
        return ExitCode.ENGINE_DIED

    def _let_servers_drain(self, signal_: str) -> None:
        """A server hears with its next look at the nodes that the head stops, and says when it has
        ended. A second signal, and the end of Ray, end the waiting.
        """
        roster = self.roster
        if roster is None or not (limit_s := roster.servers_stop_within_s()):
            return
        self._display.say(
            f"{signal_}: the server that runs on this cluster drains first, for up to"
            f" {limit_s:.0f} s"
        )
        roster.state = STOPPING
        deadline = time.monotonic() + limit_s
        while roster.servers_stop_within_s() and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=DRAIN_LOOK_S)
                if isinstance(event, NibbleError):
                    raise event
                return

    def _next(self, session: int) -> int | str | NibbleError | None:
        """A signal's name, Ray's return code, the watchdog's error, or None where it does not
        start, its node process went away quietly or the head is lost.

        `ray start --block` takes a raylet or GCS that ended on SIGTERM for a planned stop and goes
        on blocking.
        """
        needed = {"raylet", "gcs_server"} if self.role == "head" else {"raylet"}
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(queue.Empty):
                return self._events.get(timeout=WATCH_S)
            if not self._is_up and time.monotonic() >= deadline:
                return None
            members = family(session)
            self._doomed = tuple(one.pid for one in members if not is_resource_tracker(one.pid))
            if self._is_up and not needed <= {process.name for process in members}:
                return None
            if self._is_up and self.lost():
                return None

    def _read(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        verbose = self.environ.get("NIBBLE_DEBUG", "0") not in ("", "0")
        for raw in child.stdout:
            line = _ANSI.sub("", raw.decode(errors="replace")).rstrip()
            self._lines.append(line)
            if verbose:
                self._display.pass_through(2, raw)
            if not self._is_up and _STARTED in line:
                self._is_up = True
                self.on_up()
                for text in self.up:
                    self._display.say(text)


def _last_words(lines: Iterable[str]) -> str:
    """What `ray start --block` says about its dead processes (ray 2.60 scripts.py)."""
    found = [line.strip() for line in lines if re.search(r"\[exit code=", line)]
    words = [re.sub(r"^.*ERR scripts\.py:\d+ -- ", "", line) for line in found]
    return f": {'; '.join(words)}" if words else ""

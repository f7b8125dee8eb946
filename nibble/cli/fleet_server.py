"""The process of a server with several models: its ports, its gate, and the loop that loads."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from nibble.cli.common import say
from nibble.cli.fleet import Planned, ranks_of
from nibble.engine.api import Api, reachable_host
from nibble.engine.gate.admission import Admission
from nibble.engine.guard.limits import RequestLimits
from nibble.engine.installed import vllm_version
from nibble.engine.process import Stop
from nibble.engine.router.app import Router
from nibble.engine.router.front import Front
from nibble.engine.router.table import Entry, Table
from nibble.errors import ExitCode, NibbleError
from nibble.machine import early_stop
from nibble.plan.gather import Asked
from nibble.serve.above import WATCHED_ABOVE
from nibble.serve.api_key import KeyDecision
from nibble.serve.control import Answers, ControlServer
from nibble.serve.fleet.budgets import Share
from nibble.serve.fleet.fleet import Fleet, Member
from nibble.serve.fleet.memory_watch import MemoryWatch
from nibble.serve.fleet.report import Report
from nibble.serve.ready_message import key_lines
from nibble.serve.sd_notify import Heartbeat, Notifier
from nibble.settings.models import without_model
from nibble.settings.options import options


class FleetServer:
    """One run of several models."""

    def __init__(
        self,
        asked: Asked,
        planned: Sequence[Planned],
        parts: Sequence[Share],
        allowed_bytes: int,
        key: KeyDecision,
        folder: Path,
        environ: Mapping[str, str],
    ) -> None:
        settings = self._settings = asked.settings
        self._planned, self._key = planned, key
        self._api = Api(reachable_host(settings.host), settings.port, "")
        self._admission = Admission(folder / "gate")
        self._notifier = Notifier(os.environ)
        self._heartbeat = Heartbeat(self._notifier, settings.control_port)
        self._over = threading.Event()
        self._on_ready: Callable[[], None] = lambda: None
        events: queue.SimpleQueue[Stop | None] = queue.SimpleQueue()
        entries = [Entry(one.names[-1], one.names) for one in planned]
        table = Table(
            entries, lambda: events.put(None), settings.load_wait_seconds, settings.max_waiting
        )
        child = self._child_environ(environ)
        members = [
            Member(entry, share, _with_kv(one, share), {**child, **one.environ}, group=one.group)
            for entry, share, one in zip(entries, parts, planned, strict=True)
        ]
        # Each plan has the settings of its model; the machine has one reserve
        limit = max((one.plan.memory_limits for one in planned), key=lambda one: one.reserve_bytes)
        self._memory = MemoryWatch(members, limit, self._admission)
        self._fleet = Fleet(
            members, allowed_bytes, table, events, settings.drain_seconds, say,
            on_ready=self._ready, on_drain=self._stopping, turn=self._turn,
            is_short=lambda: self._memory.is_short,
        )  # fmt: skip

    def run(self, on_ready: Callable[[], None]) -> int:
        """Open the port, then load until a stop."""
        settings, fleet = self._settings, self._fleet
        self._on_ready = on_ready
        environ = self._front_environ()
        router = Router(fleet.table, RequestLimits.from_environ(environ), vllm_version())
        control = self._control()
        with _listener(settings.host, settings.port) as listener:
            front = Front(listener, router, environ, fleet.missing)
            control.start()
            threading.Thread(target=self._heartbeat.run, args=(self._over,), daemon=True).start()
            threading.Thread(target=self._memory.run, name="memory", daemon=True).start()
            try:
                front.start()
                self._admission.set("ready", "")
                return fleet.run(front)
            finally:
                self._over.set()
                self._memory.close()
                fleet.close()
                front.stop()
                control.close()
                self._admission.close()
                early_stop.over()

    def _control(self) -> ControlServer:
        report = Report(self._fleet, self._api.url, self._memory.to_json, self._admission)
        control = ControlServer(self._settings.control_port, report.status, report.is_ready)
        control.answers = Answers(
            report.status, report.is_ready, report.why, report.live, report.metrics, self._api
        )
        return control

    def _turn(self) -> None:
        self._heartbeat.turn()
        for line in self._memory.news():
            say(line)

    def _ready(self) -> None:
        count = len(self._fleet.members)
        self._notifier.send("READY=1", f"STATUS=serving {count} models at {self._api.url}")
        for line in self._ready_lines():
            say(line)
        self._on_ready()

    def _stopping(self) -> None:
        self._admission.set("draining", "drain")
        self._notifier.send("STOPPING=1")

    def _front_environ(self) -> dict[str, str]:
        """The variables of the gate: the limits of the model that needs the largest."""
        bodies = [int(one.plan.env["NIBBLE_MAX_BODY_BYTES"].value) for one in self._planned]
        names = list(RequestLimits.__dataclass_fields__)
        limits = {
            options()[name].env[0]: str(value)
            for name in names
            if (value := getattr(self._settings, name)) is not None
        }
        found = {
            **limits,
            "NIBBLE_MAX_BODY_BYTES": str(max(bodies)),
            "NIBBLE_MAX_HEADER_BYTES": str(self._settings.max_header_bytes),
            "NIBBLE_MAX_HEADERS": str(self._settings.max_headers),
            "NIBBLE_GATE_STATE": str(self._admission.path),
            "NIBBLE_GATE_CONTROL": str(self._settings.control_port),
        }
        return found | ({"NIBBLE_API_KEY": self._key.key} if self._key.key else {})

    def _child_environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment of an engine: its key is that of the port, and one client is the
        router.
        """
        names = set(options()["api_key"].env)
        dropped = {*names, *(f"{name}_FILE" for name in names)}
        dropped |= {"NIBBLE_DETACHED", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}
        kept = {k: v for k, v in without_model(environ).items() if k not in dropped}
        if self._settings.cache_dir is not None:
            kept["NIBBLE_CACHE_DIR"] = str(self._settings.cache_dir)
        kept[WATCHED_ABOVE] = "1"
        limit = options()["max_connections_per_address"].env[0]
        kept[limit] = str(self._settings.max_connections)
        return kept | ({"NIBBLE_API_KEY": self._key.key} if self._key.key else {})

    def _ready_lines(self) -> Iterator[str]:
        loading = self._settings.loading
        yield f"ready: {self._api.url}/v1 with {len(self._fleet.members)} models, loaded {loading}"
        for member in self._fleet.members:
            names = ", ".join(member.entry.names)
            size = f"{member.share.total_bytes / 2**30:.2f} GiB"
            yield f"serving {names}: {size}, {member.entry.state}"
        yield f"status page: {self._api.url}/nibble"
        yield from key_lines(self._key, on_terminal=False)


@contextlib.contextmanager
def _listener(host: str, port: int) -> Iterator[socket.socket]:
    name = host.strip().removeprefix("[").removesuffix("]")
    try:
        found = socket.getaddrinfo(
            name or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.create_server(
            found[4][:2],
            family=socket.AddressFamily(found[0]),
            backlog=2048,
            dualstack_ipv6=found[0] == socket.AF_INET6 and name in ("::", ""),
        )
    except (OSError, UnicodeError) as error:
        what = f"PORT {port} cannot be opened on {host} ({error})"
        raise NibbleError(ExitCode.CONFIG, what=what, action="set another PORT or HOST") from None
    with listener:
        yield listener


def _with_kv(planned: Planned, share: Share) -> list[str]:
    """The words of the engine, with the size of its KV cache and vLLM's sleep mode."""
    words = list(planned.words)
    for_vllm = words.index("--") if "--" in words else len(words)
    size = ["--kv-cache-bytes", str(share.kv_bytes // ranks_of(planned.plan))]
    sleep = ["--enable-sleep-mode"] if share.sleeps else []
    return [*words[:for_vllm], *size, *sleep, *words[for_vllm:]]

"""`nibble serve A B`: plans each model, divides the memory, and runs their engines behind one
port.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nibble.cli.common import say
from nibble.engine.api import Api, reachable_host
from nibble.engine.gate.admission import Admission
from nibble.engine.guard.limits import RequestLimits
from nibble.engine.installed import vllm_version
from nibble.engine.process import Stop
from nibble.errors import ExitCode, NibbleError
from nibble.machine import early_stop
from nibble.machine.host import bind_problem
from nibble.plan.gather import Asked, plan_for, read_wishes
from nibble.plan.memory import KV, ONE_SEQUENCE_MARGIN
from nibble.plan.plan import Plan
from nibble.serve.api_key import KeyDecision, resolve_api_key
from nibble.serve.control import Answers, ControlServer
from nibble.serve.fleet.budgets import MIB, Need, Share, divide
from nibble.serve.port_lock import hold_port
from nibble.serve.preflight.machine import check_memory, check_port
from nibble.serve.ready_message import key_lines
from nibble.serve.run_folder import make_run_folder
from nibble.settings.models import (
    ModelWish,
    Several,
    equal_names,
    settings_file,
    without_model,
)
from nibble.settings.options import options

SWITCHES = ("--json", "--detach")


@dataclass(frozen=True)
class Planned:
    """One model with its request, words and plan."""

    wish: ModelWish
    asked: Asked
    words: tuple[str, ...]
    plan: Plan

    @property
    def names(self) -> tuple[str, ...]:
        """Every name of its requests except `default`: its id last."""
        return tuple(name for name in self.plan.served_names if name != "default")


def plan_all(
    asked: Asked,
    several: Several,
    environ: Mapping[str, str],
    folder: Path,
    fetch: Callable[[Plan, Asked], Plan] = lambda plan, _: plan,
) -> list[Planned]:
    """A plan for each model, with its files on disk after `fetch`. Writes their settings files to
    `folder`.
    """
    _refuse_common(asked)
    found = []
    for number, wish in enumerate(several.models):
        file = folder / f"model-{number}.toml"
        file.write_text(settings_file(several, wish))
        words = [wish.model, *_without_switches(several.words)]
        own = ["--config", str(file), "--served-model-name", ",".join(wish.aliases)]
        own = own if wish.aliases else own[:2]
        for_vllm = words.index("--") if "--" in words else len(words)
        words = [*words[:for_vllm], *own, *words[for_vllm:]]
        with _named(wish.model, file, asked.settings.config):
            one = read_wishes(words, without_model(environ))
            plan = fetch(plan_for(one), one)
            check_memory(plan)
        found.append(Planned(wish, one, tuple(words), plan))
    _refuse_equal_names(found)
    return found


def shares(planned: Sequence[Planned], asked: Asked) -> tuple[tuple[Share, ...], int]:
    """The share of each model, and the bytes that all may take. Raises NO_FIT."""
    allowed = [p.plan.budget.allowed_bytes for p in planned if p.plan.budget.allowed_bytes]
    allowed_bytes = min(allowed, default=0)
    needs = [need_of(one, allowed_bytes) for one in planned]
    return divide(needs, allowed_bytes, asked.settings.loading), allowed_bytes


def need_of(planned: Planned, allowed_bytes: int) -> Need:
    """What a plan needs on one device."""
    plan = planned.plan
    budget, ranks = plan.budget, _ranks(plan)
    base_bytes = (budget.weights_bytes or 0) + budget.overhead_bytes
    least = int((budget.sequence_bytes or 0) * (1 + ONE_SEQUENCE_MARGIN))
    chosen = plan.args.get(KV)
    if budget.kv_cache_bytes is not None:
        least = full = budget.kv_cache_bytes
    elif chosen is not None:  # nibble's own choice for the whole machine
        full = int(chosen.value) * ranks
        least = min(least or full, full)
    else:
        full = budget.full_kv_bytes or allowed_bytes
    least = -(-least // (MIB * ranks)) * MIB * ranks
    return Need(planned.names[-1], base_bytes, least, max(least, full), planned.wish.keep)


def _ranks(plan: Plan) -> int:
    """On a CPU all ranks share one memory, and the flag is for one of them."""
    return plan.topology.ranks_here if plan.target.memory.kind == "host" else 1


# --- nibble serve A B ---


def serve_several(
    asked: Asked,
    several: Several,
    environ: dict[str, str],
    fetch: Callable[[Plan, Asked], Plan],
    on_ready: Callable[[], None],
) -> int:
    """Serve until a stop; the exit code of the whole."""
    settings = asked.settings
    folder = make_run_folder()
    try:
        with hold_port(settings.host, settings.port):
            for name, host, port in (
                ("PORT", settings.host, settings.port),
                ("NIBBLE_CONTROL_PORT", "127.0.0.1", settings.control_port),
            ):
                check_port(name, host, port, bind_problem(host, port))
            planned = plan_all(asked, several, environ, folder, fetch)
            parts, allowed_bytes = shares(planned, asked)
            given = settings.api_key.get_secret_value() if settings.api_key else None
            key = resolve_api_key(settings.host, given, settings.allow_anonymous, asked.cache)
            if "--json" in asked.command.rest:
                _print_start(asked, planned, parts)
            return _Server(asked, planned, parts, allowed_bytes, key, folder).run(environ, on_ready)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Server:
    """One run of several models."""

    def __init__(
        self,
        asked: Asked,
        planned: Sequence[Planned],
        parts: Sequence[Share],
        allowed_bytes: int,
        key: KeyDecision,
        folder: Path,
    ) -> None:
        self._asked, self._planned, self._parts = asked, planned, parts
        self._allowed_bytes, self._key, self._folder = allowed_bytes, key, folder
        settings = asked.settings
        host = reachable_host(settings.host)
        self._api = Api(host, settings.port, "")

    def run(self, environ: Mapping[str, str], on_ready: Callable[[], None]) -> int:
        """Open the port, then load until a stop."""
        # uvicorn and the event loop: not for planning
        from nibble.engine.router.app import Router
        from nibble.engine.router.front import Front
        from nibble.engine.router.table import Entry, Table
        from nibble.serve.fleet.fleet import Fleet, Member
        from nibble.serve.fleet.report import Report
        from nibble.serve.sd_notify import Notifier

        settings = self._asked.settings
        events: queue.SimpleQueue[Stop | None] = queue.SimpleQueue()
        entries = [Entry(one.names[-1], one.names) for one in self._planned]
        table = Table(
            entries, lambda: events.put(None), settings.load_wait_seconds, settings.max_waiting
        )
        members = [
            Member(entry, share, _with_kv(one, share), self._child_environ(environ))
            for entry, share, one in zip(entries, self._parts, self._planned, strict=True)
        ]
        admission = Admission(self._folder / "gate")
        notifier = Notifier(os.environ)

        def ready() -> None:
            notifier.send("READY=1", f"STATUS=serving {len(members)} models at {self._api.url}")
            for line in self._ready_lines(fleet):
                say(line)
            on_ready()

        def stopping() -> None:
            admission.set("draining", "drain")
            notifier.send("STOPPING=1")

        fleet = Fleet(
            members, self._allowed_bytes, table, events, settings.drain_seconds, say,
            on_ready=ready, on_drain=stopping,
        )  # fmt: skip
        front_environ = self._front_environ(admission.path)
        router = Router(table, RequestLimits.from_environ(front_environ), vllm_version())
        report = Report(fleet, self._api.url)
        control = ControlServer(settings.control_port, report.status, report.is_ready)
        control.answers = Answers(
            report.status, report.is_ready, report.why, report.live, report.metrics, self._api
        )
        with _listener(settings.host, settings.port) as listener:
            front = Front(listener, router, front_environ, fleet.missing)
            control.start()
            try:
                front.start()
                admission.set("ready", "")
                return fleet.run(front)
            finally:
                fleet.close()
                front.stop()
                control.close()
                admission.close()
                early_stop.over()

    def _front_environ(self, gate: Path) -> dict[str, str]:
        """The variables of the gate: the limits of the model that needs the largest."""
        bodies = [int(one.plan.env["NIBBLE_MAX_BODY_BYTES"].value) for one in self._planned]
        names = list(RequestLimits.__dataclass_fields__)
        limits = {
            options()[name].env[0]: str(value)
            for name in names
            if (value := getattr(self._asked.settings, name)) is not None
        }
        found = {
            **limits,
            "NIBBLE_MAX_BODY_BYTES": str(max(bodies)),
            "NIBBLE_MAX_HEADER_BYTES": str(self._asked.settings.max_header_bytes),
            "NIBBLE_MAX_HEADERS": str(self._asked.settings.max_headers),
            "NIBBLE_GATE_STATE": str(gate),
            "NIBBLE_GATE_CONTROL": str(self._asked.settings.control_port),
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
        if self._asked.settings.cache_dir is not None:
            kept["NIBBLE_CACHE_DIR"] = str(self._asked.settings.cache_dir)
        limit = options()["max_connections_per_address"].env[0]
        kept[limit] = str(self._asked.settings.max_connections)
        return kept | ({"NIBBLE_API_KEY": self._key.key} if self._key.key else {})

    def _ready_lines(self, fleet: Any) -> Iterator[str]:
        loading = self._asked.settings.loading
        yield f"ready: {self._api.url}/v1 with {len(fleet.members)} models, loaded {loading}"
        for member in fleet.members:
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
    """The words of the engine, with the size of its KV cache."""
    words = list(planned.words)
    for_vllm = words.index("--") if "--" in words else len(words)
    size = ["--kv-cache-bytes", str(share.kv_bytes // _ranks(planned.plan))]
    return [*words[:for_vllm], *size, *words[for_vllm:]]


def _print_start(asked: Asked, planned: Sequence[Planned], parts: Sequence[Share]) -> None:
    """One line, the first on stdout; a program that started us follows `status` from there."""
    start = {
        "status": f"http://127.0.0.1:{asked.settings.control_port}/status",
        "models": fleet_json(planned, parts),
    }
    print(json.dumps(start, default=str), flush=True)


def fleet_json(planned: Sequence[Planned], parts: Sequence[Share]) -> list[dict[str, Any]]:
    """Each model with its names, share and plan as plain data."""
    return [
        {"model": one.wish.model, "names": list(one.names), **_of_share(share)}
        | {"plan": one.plan.to_json()}
        for one, share in zip(planned, parts, strict=True)
    ]


def _of_share(share: Share) -> dict[str, Any]:
    return {"kv_bytes": share.kv_bytes, "total_bytes": share.total_bytes, "stays": share.stays}


# --- refusals ---


def _refuse_common(asked: Asked) -> None:
    settings = asked.settings
    if settings.nnodes or settings.node_rank or settings.head_ip or settings.cluster == "ray":
        raise NibbleError(
            ExitCode.CONFIG,
            what="several models on several machines",
            expected="one model, or one machine",
            action="unset the cluster's options, or serve one model",
        )
    if settings.served_model_name:
        raise NibbleError(
            ExitCode.CONFIG,
            what="one additional name is set for several models",
            expected="a name for each",
            action="write ALIAS=MODEL, or aliases in [[models]]",
        )
    if any(name.startswith("--ssl-") for name in asked.command.flags):
        raise NibbleError(
            ExitCode.CONFIG,
            what="vLLM's TLS flags with several models",
            expected="one model, or TLS in a proxy",
            action="put a proxy with TLS before nibble",
        )


def _refuse_equal_names(planned: Sequence[Planned]) -> None:
    seen: set[str] = set()
    for name in (name for one in planned for name in one.names):
        if name in seen:
            raise equal_names(name)
        seen.add(name)


def _without_switches(words: Sequence[str]) -> list[str]:
    """The words without switches of `serve`, which are for the whole server."""
    for_vllm = words.index("--") if "--" in words else len(words)
    return [word for word in words[:for_vllm] if word not in SWITCHES] + list(words[for_vllm:])


@contextlib.contextmanager
def _named(model: str, file: Path, config: Path | None) -> Iterator[None]:
    """Name the model in an error, and the user's file in place of the written one."""
    try:
        yield
    except NibbleError as error:
        shown = str(config) if config else "the settings of this model"
        what = error.what.replace(str(file), shown)
        what = what if model in what else f"{model}: {what}"
        raise NibbleError(
            error.code,
            what=what,
            expected=error.expected.replace(str(file), shown),
            action=error.action.replace(str(file), shown),
            unreachable=error.unreachable,
        ) from None

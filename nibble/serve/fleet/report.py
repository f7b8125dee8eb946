"""/status, the status page's data and nibble's metrics for several models."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, get_args

from nibble.engine.gate.admission import Admission
from nibble.engine.installed import build_id
from nibble.engine.router.table import ModelState
from nibble.serve.fleet.fleet import Fleet, Member
from nibble.serve.live import memory_gauges

_SUMMED = ("generated_tokens_per_s", "prompt_tokens_per_s", "running", "waiting", "answered_total")
_FROM_ENGINE = (
    *("phase", "progress", "detail", "eta_s", "seconds_in_phase", "last_line", "lost"),
    *("facts", "canary", "assertion", "traffic", "engine_pid", "hang", "url", "plan"),
)


class Report:
    """Answers of the control port. All methods run in request threads."""

    def __init__(
        self,
        fleet: Fleet,
        url: str,
        memory: Callable[[], dict[str, Any]] = dict,
        admission: Admission | None = None,
    ) -> None:
        self._fleet, self._url = fleet, url
        self._memory, self._admission = memory, admission
        self._began = time.monotonic()
        self._since = datetime.now(UTC).isoformat(timespec="seconds")

    def is_ready(self) -> bool:
        """Whether every model that stays is loaded."""
        return not (self._fleet.is_draining or self._fleet.missing() or self._paused())

    def why(self) -> str:
        """The reason where it is not."""
        if self._fleet.is_draining:
            return "draining"
        return self._paused() or f"loading {', '.join(self._fleet.missing())}"

    def _paused(self) -> str:
        """Why the watchdog admits no requests; empty if it does."""
        admission = self._admission
        return admission.phase if admission is not None and admission.state == "paused" else ""

    def status(self) -> dict[str, Any]:
        """The answer of /status, without secrets."""
        return self._of_all(self._engines(lambda process: process.status()))

    def live(self) -> dict[str, Any]:
        """The status page's data: with traffic and problems."""
        found = self._of_all(self._engines(lambda process: process.live()))
        reports = [one["traffic"] for one in found["models"] if one.get("traffic")]
        traffic = {name: _sum(reports, name) for name in _SUMMED} if reports else None
        return found | {"traffic": traffic, "gpus": [], "problems": list(_problems(found))}

    def metrics(self) -> str:
        """nibble's metrics of the models in Prometheus's text format."""
        lines = [
            "# HELP nibble_model_state The state of a model: 1 for the current one.",
            "# TYPE nibble_model_state gauge",
        ]
        members = self._fleet.members
        for member in members:
            lines += [
                f'nibble_model_state{{{_label(member)},state="{state}"}} '
                + str(int(member.entry.state == state))
                for state in get_args(ModelState)
            ]
        for name, text, value in (
            ("memory_bytes", "Memory of a model while it is loaded.", _memory_bytes),
            ("running_requests", "Requests that a model answers.", _running),
            ("waiting_requests", "Requests that wait for a model to load.", _waiting),
        ):
            full = f"nibble_model_{name}"
            lines += [f"# HELP {full} {text}", f"# TYPE {full} gauge"]
            lines += [f"{full}{{{_label(one)}}} {value(one)}" for one in members]
        now = {"state": "paused" if self._paused() else "", "memory": self._memory()}
        for full, text, values in memory_gauges(now):
            lines += [f"# HELP {full} {text}", f"# TYPE {full} gauge"]
            lines += [f"{full}{labels} {value}" for labels, value in values]
        return "\n".join(lines) + "\n"

    def _engines(self, ask: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
        """One answer for each member; empty where no engine answers."""

        def of(member: Member) -> dict[str, Any]:
            process = member.process
            return ask(process) if process is not None else {}

        with ThreadPoolExecutor(len(self._fleet.members)) as pool:
            return list(pool.map(of, self._fleet.members))

    def _of_all(self, engines: Sequence[dict[str, Any]]) -> dict[str, Any]:
        fleet = self._fleet
        missing = fleet.missing()
        paused = self._paused()
        state = "draining" if fleet.is_draining else "starting" if missing else "ready"
        phase = f"loading {', '.join(missing)}" if state == "starting" else state
        if paused and not fleet.is_draining:
            state, phase = "paused", "paused"
        used_bytes = sum(one.taken_bytes for one in fleet.members if one.process)
        return {
            "state": state,
            "phase": phase,
            "since": self._since,
            "seconds_since_start": round(time.monotonic() - self._began, 1),
            "pid": os.getpid(),
            "build": build_id(),
            "url": f"{self._url}/v1",
            "served_names": fleet.table.known_names(),
            "allowed_bytes": fleet.allowed_bytes,
            "planned_bytes": used_bytes,
            "reason": paused,
            "memory": self._memory(),
            "models": [
                _of_model(member, engine)
                for member, engine in zip(fleet.members, engines, strict=True)
            ],
        }


def _of_model(member: Member, engine: dict[str, Any]) -> dict[str, Any]:
    entry, process = member.entry, member.process
    own = {
        "model": entry.model,
        "names": list(entry.names),
        "state": entry.state,
        "reason": entry.reason,
        "stays": member.share.stays,
        "unloading": member.share.unloading,
        "total_bytes": member.share.total_bytes,
        "kv_bytes": member.share.kv_bytes,
        "running": entry.running,
        "waiting": len(entry.waiters),
        "failures": member.failures,
        "pid": process.pid if process else None,
        "control_port": process.control_port if process else None,
    }
    engine_state = {"engine_state": engine["state"]} if "state" in engine else {}
    return own | engine_state | {name: engine[name] for name in _FROM_ENGINE if name in engine}


def _problems(status: dict[str, Any]) -> Iterator[dict[str, str]]:
    for model in status["models"]:
        name = model["model"]
        if model["state"] in ("failed", "holding"):
            action = "Fix the named failure. Restart nibble if the state is failed."
            yield {"level": "red", "what": f"{name}: {model['reason']}", "action": action}
        elif model["failures"]:
            what = f"{name} ended {model['failures']} time(s) in a row: {model['reason']}"
            yield {"level": "amber", "what": what, "action": "Read its lines of the log."}
    if status["state"] == "paused":
        what = f"New requests get 503: {status['reason']}"
        yield {"level": "red", "what": what, "action": "End other programs on this machine."}


def _sum(reports: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [one[name] for one in reports if one.get(name) is not None]
    return sum(values) if values else None


def _label(member: Member) -> str:
    name = member.entry.model.replace("\\", r"\\").replace('"', r"\"")
    return f'model="{name}"'


def _memory_bytes(member: Member) -> int:
    return member.share.total_bytes


def _running(member: Member) -> int:
    return member.entry.running


def _waiting(member: Member) -> int:
    return len(member.entry.waiters)

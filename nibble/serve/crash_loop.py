"""The crash-loop breaker: a plan that failed three times waits, and after six failures does not
start.

A restart policy would restart forever, and restarts can bring whole machines down (after about 35,
eugr#257). `judge` is pure. The record is a small file for each plan in nibble's cache, so that it
does not affect other models and settings.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nibble import __version__
from nibble.errors import ExitCode, NibbleError
from nibble.machine.processes import started_ticks
from nibble.plan.memory import KV, SOURCE, UTILIZATION
from nibble.printable import printable

if TYPE_CHECKING:
    from nibble.plan.plan import Plan

# failures further apart do not count; a first start of 18 minutes on GB10 fits three times
WINDOW_S = 3600.0
HOLDS_S = (60.0, 300.0, 900.0)  # after the third, fourth and fifth failure
FIRST_HELD = 3
# MODEL means a load that vLLM ended; refusals before a run do not count.
COUNTED = (ExitCode.ENGINE_DIED, ExitCode.MODEL, ExitCode.NO_FIT, ExitCode.CANARY)
SILENT_END = "the previous start left no exit code: the machine was reset or nibble was killed"
OF_THE_PLACE = ("VLLM_HOST_IP", "VLLM_PORT")  # the next container has other values
_KEPT = 20


@dataclass(frozen=True)
class Failure:
    """One failed start: seconds since 1970, exit code and the message.

    `process` names a start that still runs; a process named there at the next start ended without
    an exit code.
    """

    at_s: float
    code: int
    cause: str
    process: str = ""


@dataclass(frozen=True)
class Verdict:
    """The decision on the next start: wait `wait_s` (0: start), or no start if `is_tripped`."""

    failures: int
    wait_s: float
    is_tripped: bool
    cause: str


def judge(failures: Sequence[Failure], now_s: float) -> Verdict:
    """Failures oldest first. A record of six holds until the user removes it; fewer expire after
    WINDOW_S.
    """
    run: list[Failure] = []
    for failure in failures:
        if run and failure.at_s - run[-1].at_s > WINDOW_S and len(run) < FIRST_HELD + len(HOLDS_S):
            run = []
        run.append(failure)
    cause = run[-1].cause if run else ""
    if len(run) >= FIRST_HELD + len(HOLDS_S):
        return Verdict(len(run), 0.0, True, cause)
    since_s = max(0.0, now_s - run[-1].at_s) if run else WINDOW_S + 1  # a clock that was set back
    if len(run) < FIRST_HELD or since_s > WINDOW_S:
        return Verdict(len(run), 0.0, False, cause)
    return Verdict(len(run), max(0.0, HOLDS_S[len(run) - FIRST_HELD] - since_s), False, cause)


def plan_key(plan: Plan, environ: Mapping[str, str]) -> str:
    """The same key for the same model, settings and versions, with any free memory and any port.

    `environ` is the user's: vLLM's variables count as settings, and so do variables that can end a
    start.
    """
    ours = (SOURCE, "nibble's default")
    args = {
        name: str(choice.value)
        for name, choice in plan.args.items()
        if name not in ("--host", "--port")
        and not (name in (KV, UTILIZATION) and choice.source in ours)
    }
    env = {name: str(choice.value) for name, choice in plan.env.items()}
    for name, value in plan.vllm_environ(environ).items():
        if name.startswith("VLLM_") and name not in OF_THE_PLACE:
            env[name] = value
    ours_too = [
        plan.settings.memory_reserve_gib,
        plan.settings.kernel_assertion,
        plan.settings.canary,
    ]
    parts: list[Any] = [
        __version__,
        plan.target.name,
        plan.model,
        plan.revision,
        args,
        env,
        ours_too,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def this_process() -> str:
    """Identifies this process among all starts with the same cache: boot, host (or container), pid,
    start.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{boot} {socket.gethostname()} {os.getpid()} {started_ticks(os.getpid())}"


def ended_without_exit_code(process: str, me: str) -> bool:
    """Whether a start without a recorded end is over: the machine has booted since, or the
    process does not exist.

    Of a process on another host (another container) of this boot nothing is known.
    """
    boot, host, pid, started = ([*process.split(" "), "", "", "", ""])[:4]
    my_boot, my_host, *_ = me.split(" ")
    return boot != my_boot or (host == my_host and started_ticks(pid) != started)


class Breaker:
    """The record of one plan. If the cache is not writable, it warns once through `say` and never
    holds.
    """

    def __init__(self, path: Path, model: str, say: Callable[[str], None]) -> None:
        self.path, self._model, self._say = path, model, say
        self._me = this_process()
        self._can_write = True

    def verdict(self) -> Verdict:
        """The decision on a start now, from the failures so far."""
        return judge([one for one in self._others() if not one.process], time.time())

    def begin(self) -> None:
        """A start begins; without an end it counts as failed."""
        running = Failure(time.time(), 0, SILENT_END, self._me)
        self._write([*self._others(), running])

    def end(self, error: NibbleError | None) -> None:
        """The start ended in order, or with `error`, which counts if its kind does."""
        failed = error is not None and error.code in COUNTED
        others = self._others()
        if failed and error is not None:
            others.append(Failure(time.time(), int(error.code), error.what))
        self._write(others)

    def clear(self) -> None:
        """A success: forget the failures of this plan. Starts that still run elsewhere stay on
        record.
        """
        self._write([one for one in self._others() if one.process])

    def tripped(self, verdict: Verdict) -> NibbleError:
        """The end of a crash loop."""
        what = f"{verdict.failures} starts in a row failed, the last with: {verdict.cause}"
        action = f"fix the cause and remove {self.path}; other settings start at once"
        return NibbleError(ExitCode.CRASH_LOOP, what=what, action=action)

    def _others(self) -> list[Failure]:
        """The record without this start. Only starts that may still run elsewhere have a `process`.

        nibble drops a damaged record.
        """
        try:
            found = [_failure(one) for one in json.loads(self.path.read_text())["failures"]]
        except OSError:  # none yet, or a cache that cannot be used: writing says so
            return []
        except (
            ValueError,
            KeyError,
            TypeError,
            RecursionError,
        ) as error:  # the last one: nested without end
            self._say(f"warning: {self.path} is damaged; nibble drops it ({type(error).__name__})")
            self._remove()
            return []
        others = [one for one in found if one.process != self._me]
        return [
            replace(one, process="") if ended_without_exit_code(one.process, self._me) else one
            for one in others
        ]

    def _write(self, failures: Sequence[Failure]) -> None:
        if not failures:
            return self._remove()
        if not self._can_write:
            return None
        text = json.dumps(
            {"model": self._model, "failures": [asdict(one) for one in failures[-_KEPT:]]}, indent=1
        )
        scratch = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with scratch.open("w") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())  # this file has to survive a machine that hangs
            scratch.replace(self.path)
        except OSError as error:
            self._can_write = False
            self._say(
                f"warning: {self.path} cannot be written ({error.strerror}): nibble does not"
                " notice crash loops"
            )
        return None

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


def _failure(entry: Any) -> Failure:
    return Failure(
        float(entry["at_s"]),
        int(entry["code"]),
        printable(str(entry["cause"])),
        str(entry["process"]),
    )

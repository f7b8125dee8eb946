"""vLLM as a child process: how it is started, what it writes, when it ends.

It lives in a separate session, so that Ctrl-C and `docker stop` reach only us, and only its API
process gets a stop signal: its engine processes take a signal to the group as an order to break
off.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO

from nibble.engine.guardian import MARK, Guardian
from nibble.machine.process_table import (
    Doomed,
    engine_title,
    family,
    is_resource_tracker,
    kill,
    kill_family,
    own_titles,
    without_trackers,
)
from nibble.machine.processes import become_subreaper, die_with_parent, ends

_CHUNK_BYTES = 1 << 16
API_SERVER = (  # part of the title of each, where there are several (vllm 0.32 v1/utils.py:524)
    "APIServer"
)


@dataclass(frozen=True, slots=True)
class Stop:
    """A signal asks us to stop."""

    signum: int


@dataclass(frozen=True, slots=True)
class Ended:
    """vLLM's API process ended with Popen's return code."""

    code: int


@dataclass(frozen=True, slots=True)
class Answering:
    """The server answered its first request."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A thread of nibble failed."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Told:
    """A message of a thread that must not wait for the terminal."""

    text: str


Event = Stop | Ended | Answering | Failed | Told


class Engine:
    """The child and the threads that follow it. Construct it in the main thread, before any other
    thread runs.

    `events` gets its end and every failure of a thread; `start_reading` begins to pass its output
    on. If this process is killed, a guardian ends the child and removes `folder`.
    """

    def __init__(
        self,
        argv: list[str],
        environ: Mapping[str, str],
        events: queue.SimpleQueue[Event],
        folder: Path | None = None,
    ) -> None:
        become_subreaper()
        mark = secrets.token_hex(16)
        self._events = events
        self._last_sign = time.monotonic()
        self._readers: list[threading.Thread] = []
        # Forked from the main thread, since its death signal hangs on the thread that forked it,
        # and while no other thread can hold a lock that the child would inherit.
        self._child = subprocess.Popen(
            child_command(argv),
            env={**environ, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509 - see above
        )
        self._doomed = Doomed(self.pid)
        self._guardian = Guardian(self.pid, mark, folder)

    @property
    def pid(self) -> int:
        """Pid of the API process, which is also the id of its session."""
        return self._child.pid

    def start_reading(
        self, pass_on: Callable[[int, bytes], None], read: Callable[[str], None]
    ) -> None:
        """`pass_on` gets (1 or 2, bytes) of stdout and stderr unchanged, `read` every line of
        both.
        """
        assert self._child.stdout is not None
        assert self._child.stderr is not None
        for source, target in ((self._child.stdout, 1), (self._child.stderr, 2)):
            self._readers.append(
                self.run(lambda s=source, t=target: self._copy(s, t, pass_on, read))
            )
        self.run(lambda: self._events.put(Ended(self._child.wait())))

    def run(self, work: Callable[[], None]) -> threading.Thread:
        """Run `work` in a thread whose failure becomes an event."""

        def guarded() -> None:
            try:
                work()
            except Exception as error:
                self._events.put(Failed(error))

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        return thread

    def silence(self) -> float:
        """Seconds since the engine's last output."""
        return time.monotonic() - self._last_sign

    def terminate(self) -> None:
        """SIGTERM to the API process alone."""
        with contextlib.suppress(ProcessLookupError):
            self._child.send_signal(signal.SIGTERM)

    def kill_at_once(self) -> None:
        """SIGKILL without a look at any process: to the API process and those `deaths` saw.

        Python's resource trackers live on, to remove the shared memory. `kill` finds the rest.
        """
        self._child.kill()
        self._doomed.kill()

    def kill_below(self) -> None:
        """SIGKILL to all but the API servers, which then end their clients' requests with an
        error.
        """
        for process in family(self.pid):
            title = engine_title(process.pid) or ""
            spared = process.pid in (self.pid, self._guardian.pid) or is_resource_tracker(
                process.pid
            )
            if not spared and API_SERVER not in title:
                kill(process.pid)

    def has_ended(self) -> bool:
        """Whether the API process is gone."""
        return not any(process.pid == self.pid for process in family(self.pid))

    def deaths(self, over: threading.Event) -> Iterator[str]:
        """The title and pid of each vLLM process below the API server, when it ends, until
        `over`.
        """

        def find() -> dict[int, str]:
            processes = [one for one in family(self.pid) if one.pid != self._guardian.pid]
            self._doomed.look(processes)
            titles = own_titles(processes, lambda one: engine_title(one.pid))
            return {pid: f"{own} (pid {pid})" for pid, own in titles.items() if pid != self.pid}

        try:
            yield from ends(find, over)
        finally:
            self._doomed.forget()

    def last_words(self) -> None:
        """Wait a moment until all output before its end has been read."""
        for reader in self._readers:
            reader.join(timeout=1)

    def kill(self) -> list[int]:
        """End all its processes; returns the pids that could not be killed."""
        self._guardian.dismiss()
        kill_family(self.pid)
        self.last_words()
        return without_trackers(family(self.pid))

    def _copy(
        self,
        source: IO[bytes],
        target: int,
        pass_on: Callable[[int, bytes], None],
        read: Callable[[str], None],
    ) -> None:
        rest = b""
        while data := os.read(source.fileno(), _CHUNK_BYTES):
            self._last_sign = time.monotonic()
            pass_on(target, data)
            # A carriage return ends a line too: progress bars.
            *lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
            rest = rest[-_CHUNK_BYTES:]
            for line in filter(None, lines):
                read(line.decode(errors="replace"))


def child_command(argv: list[str]) -> list[str]:
    """The command line of vLLM: this interpreter, without the working directory on its import
    path.
    """
    return [sys.executable, "-P", "-m", "nibble.engine.start_vllm", *argv]


def child_environ(
    base: Mapping[str, str], gate: Path, internal_token: str, key: str | None
) -> dict[str, str]:
    """`base` and the variables of the gate inside vLLM; the key is a variable and never an
    argument.
    """
    added = {
        "PYTHONUNBUFFERED": "1",
        # vLLM starts `python -m vllm.model_executor.models.registry` in this folder (vllm 0.32
        # models/registry.py:1595): a folder `nibble` here must not hide the package.
        "PYTHONSAFEPATH": "1",
        "NIBBLE_GATE_STATE": str(gate),
        "NIBBLE_GATE_INTERNAL": internal_token,
    }
    if key is not None:
        added["NIBBLE_API_KEY"] = key
    try:
        metadata.distribution("nibble-appliance")
    except metadata.PackageNotFoundError:
        # Run from a checkout: vLLM must find nibble.engine.gate.asgi all the same.
        here = str(Path(__file__).resolve().parents[2])
        added["PYTHONPATH"] = os.pathsep.join(filter(None, [here, base.get("PYTHONPATH")]))
    return {**base, **added}

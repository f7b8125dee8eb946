"""The processes of this machine: which belong to a server, what they do, and how to end them.

Import it late: psutil takes 0.05 s to import, and `nibble plan` looks at no process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import psutil

from nibble.machine.processes import reap

_TRACKER_S = 10.0  # a tracker that has just been started imports Python first, on a busy machine
_POLL_S = 0.02
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Process:
    """A living process. `state` is one of psutil's STATUS_*."""

    pid: int
    name: str
    parent: int
    session: int
    state: str
    cpu_seconds: float


def processes() -> list[Process]:
    """Every living process visible here."""
    return _living(psutil.pids())


def family(session: int) -> list[Process]:
    """Living members of `session` and living descendants of ours, without ourselves."""
    pids = {pid for pid in psutil.pids() if _session(pid) == session} | _descendants()
    return _living(pids - {os.getpid()})


def _living(pids: Iterable[int]) -> list[Process]:
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError):  # it ended meanwhile
            one = psutil.Process(pid)
            with one.oneshot():
                times, state = one.cpu_times(), one.status()
                if state != psutil.STATUS_ZOMBIE:
                    cpu_seconds = times.user + times.system
                    session = os.getsid(pid)
                    found.append(Process(pid, one.name(), one.ppid(), session, state, cpu_seconds))
    return found


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _descendants() -> set[int]:
    ours = psutil.Process()
    try:
        return {one.pid for one in ours.children(recursive=True)}
    except psutil.AccessDenied:
        # One process that may not be read, as with hidepid=1 or systemd's ProtectProc=noaccess,
        # ends that look (psutil 7.2 _pslinux.py:1574). Ours may be read, with all that are above.
        return {one.pid for one in psutil.process_iter() if _is_below(one, ours)}


def _is_below(process: psutil.Process, ancestor: psutil.Process) -> bool:
    try:
        return ancestor in process.parents()
    except psutil.Error:
        return False


def kill_family(session: int, timeout_s: float = 5.0) -> list[int]:
    """`kill_until_gone` for `family(session)`; ended children are collected."""
    killed = kill_until_gone(lambda: family(session), timeout_s)
    reap()
    return killed


def kill_until_gone(find: Callable[[], Sequence[Process]], timeout_s: float = 5.0) -> list[int]:
    """SIGKILL what `find` returns until it returns nothing; returns the killed pids.

    Python's resource trackers may end by themselves once the others are gone: they remove the
    shared memory of killed processes. Processes in uninterruptible sleep (a hung driver) survive
    `timeout_s`, and with them their trackers; the caller reports them.
    """
    killed = _kill_repeatedly(lambda: without_trackers(find()), timeout_s)
    if without_trackers(find()):
        return sorted(killed)
    deadline = time.monotonic() + _TRACKER_S
    while find() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return sorted(killed | _kill_repeatedly(lambda: [one.pid for one in find()], timeout_s=1))


def _kill_repeatedly(find: Callable[[], list[int]], timeout_s: float) -> set[int]:
    """It repeats, because a process can fork between the listing and the kill."""
    killed: set[int] = set()
    deadline = time.monotonic() + timeout_s
    while (pids := find()) and time.monotonic() < deadline:
        killed |= {pid for pid in pids if kill(pid)}
        time.sleep(_POLL_S)
    return killed


def kill(pid: int) -> bool:
    """SIGKILL; False where it is gone or another user's."""
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def without_trackers(processes: Iterable[Process]) -> list[int]:
    """Their pids, without those of Python's resource trackers."""
    return [one.pid for one in processes if not is_resource_tracker(one.pid)]


class Doomed:
    """Pids that a watchdog kills at once when memory runs out.

    A look at any process could block then (/proc/PID/cmdline waits for its memory map), so they
    come from the last looks before. A process counts from its second look on: Python's resource
    tracker has the command line of the process that forked it until it executes its program.
    """

    def __init__(self, *first: int) -> None:
        self._seen = set(first)
        self._pids = frozenset(first)

    def look(self, processes: Iterable[Process]) -> None:
        """Keep what was there at the last look too, without Python's resource trackers."""
        pids = set(without_trackers(processes))
        self._pids, self._seen = frozenset(pids & self._seen), pids

    def forget(self) -> None:
        """Another process may soon have such a pid."""
        self._pids = frozenset()

    def kill(self) -> None:
        """SIGKILL to each. What was forked since is the caller's to find."""
        for pid in self._pids:
            kill(pid)

    def __contains__(self, pid: int) -> bool:
        return pid in self._pids


def is_resource_tracker(pid: int) -> bool:
    """Whether it is the process that CPython's multiprocessing/resource_tracker.py starts."""
    call = "from multiprocessing.resource_tracker import main"
    return any(call in word for word in _words(pid))


def engine_title(pid: int) -> str | None:
    """The title that vLLM set for its process (`VLLM::EngineCore`), or None for any other."""
    title = next(iter(_words(pid)), "").strip()
    return title if title.startswith("VLLM::") else None


def own_titles(
    processes: Sequence[Process], title: Callable[[Process], str | None]
) -> dict[int, str]:
    """The processes (pid -> title) that have a title which is not their parent's too.

    A forked child has its parent's title until it executes a program or sets its own; its end means
    nothing.
    """
    titles = {one.pid: found for one in processes if (found := title(one))}
    parents = {one.pid: one.parent for one in processes}
    return {pid: own for pid, own in titles.items() if titles.get(parents[pid]) != own}


def _words(pid: int) -> list[str]:
    """The words of a process's command line; empty without the process."""
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []


@dataclass(frozen=True, slots=True)
class Activity:
    """Work of a family: CPU seconds, and bytes read from storage (None where the kernel does not
    report them).
    """

    cpu_seconds: float
    read_bytes: int | None

    def since(self, earlier: Activity) -> str:
        """The difference in words, for a report on a silent engine."""
        text = f"{max(self.cpu_seconds - earlier.cpu_seconds, 0):.0f} s of CPU time"
        if self.read_bytes is None or earlier.read_bytes is None:
            return text
        return (
            f"{text}, {max(self.read_bytes - earlier.read_bytes, 0) / _GIB:.1f} GiB read from disk"
        )


def activity(session: int) -> Activity:
    """The sum for the living family of `session`."""
    members = family(session)
    read = [_read_bytes(member.pid) for member in members]
    known = [number for number in read if number is not None]
    return Activity(sum(member.cpu_seconds for member in members), sum(known) if known else None)


def _read_bytes(pid: int) -> int | None:
    try:
        counters = psutil.Process(pid).as_dict(["io_counters"])["io_counters"]
    except (psutil.Error, RuntimeError, ValueError):  # the last where the kernel counts none
        return None
    return counters.read_bytes if counters else None

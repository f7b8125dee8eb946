"""Linux process work: a child that cannot outlive us, and an end that leaves nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from nibble.machine import early_stop

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_MCL_CURRENT, _MCL_FUTURE, _MCL_ONFAULT = 1, 2, 4  # asm-generic/mman.h
OOM_SCORE_STEP = 500  # of 1000: half of all memory; the engine's share counts on top of it
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_libc = ctypes.CDLL(None, use_errno=True)
_GIB = 1 << 30
REPEAT_S = 1.0
TRACKER_S = 1.0
_LOOK_FOR_PROCESSES_MS = 1000


def become_subreaper() -> None:
    """Orphans of our children become ours instead of init's, so that `kill_descendants` finds
    them.
    """
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> Callable[[], None]:
    """For Popen's preexec_fn: the child gets SIGTERM when the thread that started it ends, our main
    thread.

    SIGTERM and not SIGKILL: vLLM's API process has to end its engine, which would otherwise stay.
    """

    def arm() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        shift_oom_score(OOM_SCORE_STEP)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return arm


def shift_oom_score(by: int) -> None:
    """Make the kernel's OOM killer take this process (and what it starts) more readily, or less
    where that is permitted.

    Everybody may raise the score; lowering it needs CAP_SYS_RESOURCE.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        try:
            score = int(os.read(descriptor, 16)) + by
            os.pwrite(descriptor, str(max(-1000, min(1000, score))).encode(), 0)
        finally:
            os.close(descriptor)


def survive_memory_pressure() -> None:
    """Make this process the last one the kernel takes, and keep its pages in memory, as far as
    that is permitted.
    """
    shift_oom_score(-OOM_SCORE_STEP)
    # ENOMEM or EPERM where RLIMIT_MEMLOCK is small: then a page of ours may have to be read back
    # from disk.
    _libc.mlockall(_MCL_CURRENT | _MCL_FUTURE | _MCL_ONFAULT)


@dataclass(frozen=True, slots=True)
class Process:
    """One line of the process table, from /proc/PID/stat.

    `state` "Z" is a zombie; `name` has at most 15 bytes. Major faults are pages that came from
    disk.
    """

    pid: int
    name: str
    parent: int
    session: int
    state: str
    cpu_seconds: float
    major_faults: int


def processes() -> list[Process]:
    """Every process visible here."""
    found = (
        _read_stat(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()
    )
    return [process for process in found if process]


def _read_stat(pid: int) -> Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None  # it ended meanwhile
    end = text.rindex(")")  # the name in parentheses may itself hold any character
    fields = text[end + 2 :].split()
    ticks = int(fields[11]) + int(fields[12])
    return Process(
        pid,
        text[text.index("(") + 1 : end],
        int(fields[1]),
        int(fields[3]),
        fields[0],
        ticks / os.sysconf("SC_CLK_TCK"),
        int(fields[9]),
    )


def started_ticks(pid: int | str) -> str:
    """When a process started, in clock ticks since boot, which tells two with the same pid
    apart; empty where there is none.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def family(session: int) -> list[Process]:
    """Living members of `session` and living descendants of ours, without ourselves."""
    table = {process.pid: process for process in processes()}
    ours = os.getpid()

    def descends(process: Process) -> bool:
        seen = set()
        while process.parent not in seen and process.parent in table:
            if process.parent == ours:
                return True
            seen.add(process.parent)
            process = table[process.parent]
        return process.parent == ours

    return [
        process
        for process in table.values()
        if process.pid != ours
        and process.state != "Z"
        and (process.session == session or descends(process))
    ]


def kill_family(session: int, timeout_s: float = 5.0) -> list[int]:
    """SIGKILL everything in `family` until nothing is left; the pids that were killed.

    Repeated, because a process can fork between the look and the blow. Processes in uninterruptible
    sleep (a hung driver) survive `timeout_s`; the caller reports them through `family`. Python's
    resource trackers may end by themselves: they remove the shared memory of those that were
    killed.
    """
    killed: set[int] = set()
    began = time.monotonic()
    while (members := family(session)) and (past_s := time.monotonic() - began) < timeout_s:
        for member in members:
            if past_s < TRACKER_S and is_resource_tracker(member.pid):
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(member.pid, signal.SIGKILL)
                killed.add(member.pid)
        time.sleep(0.02)
    reap()
    return sorted(killed)


def is_resource_tracker(pid: int) -> bool:
    """Whether it is the process that CPython's multiprocessing/resource_tracker.py starts."""
    try:
        return (
            b"from multiprocessing.resource_tracker import main"
            in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
    except OSError:
        return False


def reap() -> None:
    """Collect ended children, adopted ones too. Only when nobody waits for a certain child any
    more.
    """
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def engine_title(pid: int) -> str | None:
    """The title vLLM gave a process of its own (`VLLM::EngineCore`), or None for any other."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    title = text.partition(b"\0")[0].decode(errors="replace").strip()
    return title if title.startswith("VLLM::") else None


def first_end(find: Callable[[], Mapping[int, str]], over: threading.Event) -> str | None:
    """Waits until one of the processes that `find` names (pid -> how to name it) ends: that name.
    None once `over`.

    `find` is asked again every second. A process counts from the second look on: between fork and
    exec every child bears its parent's title. None too where the kernel has no pidfd_open (before
    Linux 5.3).
    """
    known: dict[int, str] = {}  # descriptor of a process -> how to name it
    poll, watched, seen = select.poll(), set[int](), set[int]()
    try:
        while not over.is_set():
            named = find()
            for pid in (named.keys() & seen) - watched:
                try:
                    known[descriptor := os.pidfd_open(pid)] = named[pid]
                except ProcessLookupError:  # it ended since the look
                    return named[pid]
                poll.register(descriptor, select.POLLIN)
                watched.add(pid)
            seen = set(named)
            for descriptor, _ in poll.poll(_LOOK_FOR_PROCESSES_MS):
                return known[descriptor]
    except OSError:
        pass
    finally:
        for descriptor in known:
            os.close(descriptor)
    return None


@dataclass(frozen=True, slots=True)
class Activity:
    """What a family has done: CPU seconds, bytes read from storage (None where the kernel does
    not say).
    """

    cpu_seconds: float
    read_bytes: int | None

    def since(self, earlier: Activity) -> str:
        """In words, for a report on a silent engine."""
        text = f"{max(self.cpu_seconds - earlier.cpu_seconds, 0):.0f} s of CPU time"
        if self.read_bytes is None or earlier.read_bytes is None:
            return text
        return (
            f"{text}, {max(self.read_bytes - earlier.read_bytes, 0) / _GIB:.1f} GiB read from disk"
        )


def activity(session: int) -> Activity:
    """Sum over the living family of `session`."""
    members = family(session)
    read = [_read_bytes(member.pid) for member in members]
    known = [number for number in read if number is not None]
    return Activity(sum(member.cpu_seconds for member in members), sum(known) if known else None)


def _read_bytes(pid: int) -> int | None:
    try:
        for line in Path(f"/proc/{pid}/io").read_text().splitlines():
            if line.startswith("read_bytes: "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return None


@contextlib.contextmanager
def stop_signals(tell: Callable[[int], None]) -> Iterator[None]:
    """Stop signals become events while this is open. One that the caller ignores (nohup) stays
    ignored.
    """

    def handle(signum: int, frame: FrameType | None) -> None:
        tell(signum)  # SimpleQueue.put is reentrant

    before = {one: signal.getsignal(one) for one in STOP_SIGNALS}
    for one in STOP_SIGNALS:
        if before[one] != signal.SIG_IGN or one != signal.SIGHUP:
            signal.signal(one, handle)
    if signum := early_stop.told():
        tell(signum)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def signal_name(signum: int) -> str:
    """`SIGTERM` for 15."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def once_a_second(tell: Callable[[int], None]) -> Callable[[int], None]:
    """Signals within a second of one that counted are the same wish: `timeout` sends SIGTERM to
    us and to our group.
    """
    counted = float("-inf")

    def handle(signum: int) -> None:
        nonlocal counted
        now = time.monotonic()
        if now - counted >= REPEAT_S:
            counted = now
            tell(signum)

    return handle

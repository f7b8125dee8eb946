"""Linux process work: a child that cannot outlive us, its end, and signals as events."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

from nibble.machine import early_stop

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_MCL_CURRENT, _MCL_FUTURE, _MCL_ONFAULT = 1, 2, 4  # asm-generic/mman.h
OOM_SCORE_STEP = 500  # of 1000: half of all memory; the engine's share counts on top of it
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_libc = ctypes.CDLL(None, use_errno=True)
REPEAT_S = 1.0
_LOOK_FOR_PROCESSES_MS = 1000


def become_subreaper() -> None:
    """Make orphans of child processes ours instead of init's, so that `kill_descendants` finds
    them.
    """
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> Callable[[], None]:
    """For Popen's preexec_fn: the child gets SIGTERM when the thread that started it ends, our main
    thread.

    It is SIGTERM, not SIGKILL: vLLM's API process must end its engine, which would otherwise stay.
    """

    def arm() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        shift_oom_score(OOM_SCORE_STEP)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return arm


def shift_oom_score(by: int) -> None:
    """Make the kernel's OOM killer more likely to kill this process and its children, or less
    likely where that is permitted.

    Any process may raise its score; lowering it needs CAP_SYS_RESOURCE.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        try:
            score = int(os.read(descriptor, 16)) + by
            os.pwrite(descriptor, str(max(-1000, min(1000, score))).encode(), 0)
        finally:
            os.close(descriptor)


def survive_memory_pressure() -> None:
    """Make this process the last that the OOM killer selects, and lock its pages in memory, as far
    as permitted.
    """
    shift_oom_score(-OOM_SCORE_STEP)
    # ENOMEM or EPERM where RLIMIT_MEMLOCK is small: then a page of ours may have to be read back
    # from disk.
    _libc.mlockall(_MCL_CURRENT | _MCL_FUTURE | _MCL_ONFAULT)


def started_ticks(pid: int | str) -> str:
    """When a process started, in clock ticks since boot; it distinguishes processes that reuse a
    pid. Empty without the process.

    psutil's create_time adds the boot time, which moves when the clock is set.
    """
    return _stat_field(pid, 19)


def major_faults(pid: int) -> int:
    """Pages that a process has read from disk, which psutil 7 does not report; 0 without the
    process.
    """
    return int(_stat_field(pid, 9) or 0)


def run_delay_s(pid: int) -> float:
    """Seconds that a process's threads, those that run now, waited for a CPU; 0 without the process
    or where the kernel does not count them.
    """
    waited = 0
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            waited += int(file.read_text().split()[1])
    return waited / 1e9


def _stat_field(pid: int | str, number: int) -> str:
    """A field of /proc/PID/stat, counted after the name; empty without the process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return text.rpartition(")")[2].split()[number]
    except (OSError, IndexError):
        return ""


def reap() -> None:
    """Collect ended children, adopted ones too. Call it only when no caller waits for a certain
    child.
    """
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def ends(find: Callable[[], Mapping[int, str]], over: threading.Event) -> Iterator[str]:
    """The names of the processes that `find` names (pid -> name), each when it ends, until `over`.

    `find` is called at least every second, and what it named stays watched between two ends.
    Nothing comes where the kernel has no pidfd_open (before Linux 5.3).
    """
    watched: dict[int, int] = {}  # pid -> its descriptor
    known: dict[int, tuple[int, str]] = {}  # descriptor -> pid and name
    poll = select.poll()

    def forget(descriptor: int) -> str:
        pid, name = known.pop(descriptor)
        del watched[pid]
        poll.unregister(descriptor)
        os.close(descriptor)
        return name

    try:
        while not over.is_set():
            for pid, name in find().items():
                if pid in watched:
                    continue
                try:
                    descriptor = os.pidfd_open(pid)
                except ProcessLookupError:  # it ended since the look
                    yield name
                    continue
                watched[pid], known[descriptor] = descriptor, (pid, name)
                poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll(_LOOK_FOR_PROCESSES_MS):
                yield forget(descriptor)
    except OSError:
        pass
    finally:
        for descriptor in known:
            os.close(descriptor)


@contextlib.contextmanager
def stop_signals(tell: Callable[[int], None]) -> Iterator[None]:
    """Turn stop signals into events inside the block. A signal that the caller ignores (nohup)
    stays ignored.
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
    """Drop signals within a second of the last one that counted: `timeout` sends SIGTERM to us and
    to our group.
    """
    counted = float("-inf")

    def handle(signum: int) -> None:
        nonlocal counted
        now = time.monotonic()
        if now - counted >= REPEAT_S:
            counted = now
            tell(signum)

    return handle

"""The worker that compiles structured outputs within limits: a fork of the API process.

A fork already has vLLM's code, configuration and tokenizer. A new process would import vLLM for
seconds and take 400 MB. The worker has one thread and forks a child for each compile; if a child
exceeds its limits, the worker kills it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import marshal
import os
import resource
import selectors
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NoReturn

from nibble.engine.guard.frames import packed, unpacked
from nibble.engine.guard.grammar_compile import (
    Compiler,
    NeedsBackend,
    OutOfMemory,
    Refusal,
    TooSlow,
)
from nibble.engine.guard.grammar_fields import CHAT

# Number, route, fields, and the monotonic time until which the compile has to begin.
Job = tuple[int, str, dict[str, Any], float]
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# A CPU engine may keep every core busy: beside one of its threads, a child gets 44 % of a core.
# With 5 it would get 25 %, less than _BUSY_GRACE allows.
_NICE = 1
_OOM_SCORE = b"1000"  # the kernel kills the worker before other processes
# A child may take this multiple of its CPU seconds in elapsed time, for a busy machine.
_BUSY_GRACE = 3
_CLOCK_S = 0.05  # resolution of the measured CPU time
_MIB = 1 << 20
_STACK_BYTES = 4 << 20
# Compiles at a time. With 256 MiB each they fit into the memory that nibble reserves for the
# machine.
_SLOTS = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one compile.

    seconds: CPU time; memory_mib: above the worker's memory; input_bytes: size of the fields.
    """

    seconds: float
    memory_mib: int
    input_bytes: int = 1 << 20

    @property
    def longest_seconds(self) -> float:
        """Elapsed time after which a child is killed in any case."""
        return self.seconds * _BUSY_GRACE


@dataclass(slots=True)
class Child:
    """The process of one compile. began, deadline: monotonic seconds; answer: bytes so far."""

    pid: int
    job: Job
    began: float
    deadline: float
    answer: bytes = b""

    @property
    def number(self) -> int:
        """The number of the job."""
        return self.job[0]


def start(app: Any, limits: Limits) -> tuple[int, socket.socket]:
    """Fork the worker and return its pid and the API process's end of the socket.

    Call it in the main thread: the kernel kills the worker when the calling thread ends.
    """
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _become_worker(parent, theirs, app, limits)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    ours.setblocking(False)
    return pid, ours


def _become_worker(parent: int, control: socket.socket, app: Any, limits: Limits) -> NoReturn:
    """Detach from the API process, then serve. Never returns."""
    try:
        unused = _detach(parent, control)
        worker = Worker(control, Compiler.of_app(app), limits, unused)
        worker.run()
    except BaseException as error:
        with contextlib.suppress(BaseException):
            control.sendall(packed((-1, "failed", type(error).__name__)))
    os._exit(0)


def _detach(parent: int, control: socket.socket) -> int:
    """Remove the API process's signal handlers, descriptors, garbage collection and title.

    Returns the number of a descriptor that the API process did not use.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    # A collected socket or transport would write to descriptors shared with the API process.
    gc.disable()
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    # The API process handles Ctrl-C, and the worker ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    unused = 1 + max(int(name) for name in os.listdir("/proc/self/fd"))
    _close_all_but(control.fileno())
    _retitle()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb") as file:
        file.write(_OOM_SCORE)
    return unused


def _close_all_but(kept: int) -> None:
    """Close copied descriptors: a client's connection would otherwise never end."""
    devnull = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(devnull, standard)
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))


def _retitle() -> None:
    """Change the copied title: the supervisor watches processes titled VLLM:: as the engine
    (processes.engine_title).
    """
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle("nibble: grammars")


class Worker:
    """Reads jobs and sends answers: (number, outcome, text, seconds on the event loop).

    Outcomes: "served"; "refused" and "slow" with a reason; "time", "memory", "crashed", "busy".
    """

    def __init__(
        self, control: socket.socket, compiler: Compiler, limits: Limits, unused: int
    ) -> None:
        self._control, self._compiler, self._limits = control, compiler, limits
        self._unused = unused  # a descriptor's number, see _begin
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._waiting: deque[Job] = deque()
        self._children: dict[int, Child] = {}  # by the pipe that a child answers through
        self._received = bytearray()

    def run(self) -> None:
        """Serve until the API process closes its end of the socket."""
        configured = self._compiler.vllm_config.structured_outputs_config.backend
        self._compiler.first = None if configured == "auto" else configured
        self._compiler.warm()
        self._build("xgrammar" if configured == "auto" else configured)
        # A first compile here imports modules that each child would import again.
        self._outcome(CHAT, {"response_format": {"type": "json_object"}})
        while True:
            while self._waiting and len(self._children) < _SLOTS:
                self._begin(self._waiting.popleft())
            for key, _ in self._selector.select(self._next_deadline_s()):
                if key.fileobj is self._control:
                    if not self._read_requests():
                        return
                else:
                    self._read_answer(key.fd)
            self._kill_late()

    def _next_deadline_s(self) -> float | None:
        """Seconds to the first deadline of a child."""
        if not self._children:
            return None
        return max(0.0, min(child.deadline for child in self._children.values()) - time.monotonic())

    def _read_requests(self) -> bool:
        data = self._control.recv(1 << 20)
        self._received += data
        self._waiting.extend(unpacked(self._received))
        return bool(data)

    def _begin(self, job: Job) -> None:
        number, path, fields, start_before = job
        if time.monotonic() > start_before:
            return self._answer(number, "busy")
        reader, writer = os.pipe()
        # vLLM's event loop is libuv. In each forked child libuv closes the two descriptors that its
        # pipe of signals had in the API process (libuv src/unix/signal.c,
        # uv__signal_global_reinit), so the pipe to the child needs another number.
        kept = fcntl.fcntl(writer, fcntl.F_DUPFD_CLOEXEC, self._unused)
        os.close(writer)
        pid = os.fork()
        if pid == 0:
            self._become_child(kept, path, fields)
        os.close(kept)
        self._children[reader] = Child(
            pid, job, now := time.monotonic(), now + self._limits.seconds
        )
        self._selector.register(reader, selectors.EVENT_READ)
        return None

    def _become_child(self, writer: int, path: str, fields: dict[str, Any]) -> NoReturn:
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            os.nice(_NICE)
            limit_data(self._limits.memory_mib * _MIB)
            # Half the stack of the threads in the API process and the engine: a compile that fits
            # here fits there.
            resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, _STACK_BYTES))
            os.write(writer, marshal.dumps(self._outcome(path, fields)))
        except BaseException as error:
            with contextlib.suppress(BaseException):
                os.write(writer, marshal.dumps(("crashed", type(error).__name__, 0.0)))
        os._exit(0)

    def _outcome(self, path: str, fields: dict[str, Any]) -> tuple[str, str, float]:
        try:
            backend, loop_seconds = self._compiler.check(path, fields)
            return "served", backend or "", loop_seconds
        except TooSlow as refusal:
            return "slow", str(refusal), 0.0
        except Refusal as refusal:
            return "refused", str(refusal), 0.0
        except NeedsBackend as needed:
            return "needs", str(needed), 0.0
        except (MemoryError, OutOfMemory):
            return "memory", "", 0.0
        except Exception as error:
            return "refused", f"It cannot be compiled ({type(error).__name__}).", 0.0

    def _read_answer(self, reader: int) -> None:
        child = self._children[reader]
        if data := os.read(reader, 1 << 16):
            child.answer += data
            return
        status = self._reap(reader)
        if child.answer:
            self._finish(child, *marshal.loads(child.answer))
        elif os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGSEGV, signal.SIGBUS):
            self._answer(child.number, "refused", "It nests or refers to itself too deeply.")
        elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGABRT:
            # std::bad_alloc in a thread, or Rust's allocator, ends in abort().
            self._answer(child.number, "memory")
        else:
            self._answer(child.number, "crashed", f"wait status {status}")

    def _finish(self, child: Child, outcome: str, text: str, loop_seconds: float) -> None:
        """Answer a job, or build the backend that it needs and start it again."""
        if outcome == "needs":
            if problem := self._build(text):
                return self._answer(child.number, "refused", problem)
            return self._waiting.appendleft(child.job)
        if outcome == "served" and text and self._compiler.first is None:
            self._compiler.first = text
        return self._answer(child.number, outcome, text, loop_seconds)

    def _build(self, name: str) -> str:
        """Build a backend; returns the problem or ""."""
        try:
            self._compiler.build(name)
        except Exception as error:
            return f"This server cannot use {name} ({type(error).__name__})."
        return ""

    def _kill_late(self) -> None:
        now = time.monotonic()
        for reader, child in list(self._children.items()):
            if child.deadline > now:
                continue
            left = self._limits.seconds - cpu_seconds(child.pid)
            latest = child.began + self._limits.longest_seconds
            if left > _CLOCK_S and now < latest:
                child.deadline = min(now + left, latest)
                continue
            self._reap(reader, kill=True)
            self._answer(child.number, "busy" if left > _CLOCK_S else "time")

    def _reap(self, reader: int, kill: bool = False) -> int:
        """Wait for a child's end, after killing it if asked, and return its wait status."""
        child = self._children.pop(reader)
        self._selector.unregister(reader)
        os.close(reader)
        if kill:
            os.kill(child.pid, signal.SIGKILL)
        return os.waitpid(child.pid, 0)[1]

    def _answer(self, number: int, outcome: str, text: str = "", loop_seconds: float = 0.0) -> None:
        self._control.sendall(packed((number, outcome, text, loop_seconds)))


def limit_data(more_bytes: int) -> None:
    """Limit this process to `more_bytes` more than it has now.

    RLIMIT_DATA counts only private writable memory (since Linux 4.7). RLIMIT_AS would also count
    the gigabytes of libraries and shared memory that vLLM maps.
    """
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        held = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (held + more_bytes, held + more_bytes))


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process in seconds, from /proc/PID/stat."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        numbers = file.read().rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")

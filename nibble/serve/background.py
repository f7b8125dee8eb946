"""`nibble serve --detach`, `nibble stop`, `nibble logs`: one server in the background for each
port.

The server keeps the record (servers/PORT.json in nibble's cache): its identity, its exit code, and
a lock that the kernel releases at its end. No other process is involved: the shell that detached it
may end.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from nibble.errors import ExitCode, NibbleError
from nibble.machine.disk import not_writable
from nibble.printable import printable
from nibble.serve.crash_loop import ended_without_exit_code, this_process
from nibble.serve.log_file import LogFile
from nibble.serve.port_lock import is_held

VARIABLE = "NIBBLE_DETACHED"  # tells a server that it is one in the background
STOP_MARGIN_S = 30.0  # beyond the drain: vLLM's end took 10 s at most
_POLL_S = 0.1


@dataclass(frozen=True)
class Record:
    """A background server; `process` identifies it on the machine (crash_loop.this_process)."""

    pid: int
    process: str
    port: int
    control_port: int
    drain_s: int
    model: str
    started: float
    exit_code: int | None = None


@dataclass(frozen=True)
class Place:
    """The files of one port below nibble's cache."""

    cache: Path
    port: int

    @property
    def record(self) -> Path:
        return self.cache / "servers" / f"{self.port}.json"

    @property
    def lock(self) -> Path:
        return self.record.with_suffix(".lock")

    @property
    def log(self) -> LogFile:
        return LogFile(self.cache / "logs" / f"{self.port}.log")

    def read(self) -> Record | None:
        """The last server's record, or None without a readable one."""
        try:
            found = Record(**json.loads(self.record.read_text()))
            is_whole = isinstance(found.pid, int) and found.process.count(
                " "
            ) == this_process().count(" ")
            return found if is_whole else None
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return None

    def write(self, record: Record) -> None:
        """Replace the record atomically."""
        scratch = self.record.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(json.dumps(asdict(record)) + "\n")
        scratch.replace(self.record)

    def is_running(self) -> bool:
        """Whether a server holds the port's lock."""
        try:
            descriptor = os.open(self.lock, os.O_RDONLY | os.O_CLOEXEC)
        except PermissionError:
            return self._of_another_user()
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)

    def _of_another_user(self) -> bool:
        """Whether another user's server holds the lock. Raises CONFIG if its record is unreadable
        too.
        """
        record = self.read()
        if record is None:
            what = f"{self.record} cannot be read (Permission denied)"
            action = (
                "run it as the user who started the server, or name another folder with"
                " NIBBLE_CACHE_DIR"
            )
            raise NibbleError(ExitCode.CONFIG, what=what, action=action)
        return record.exit_code is None and not ended_without_exit_code(
            record.process, this_process()
        )


# --- nibble serve --detach ---


def detach(place: Place, words: Sequence[str], environ: Mapping[str, str]) -> Record:
    """Start `nibble serve WORDS` in the background; its record once it answers /status.

    Raises CONFIG if one already runs on this port, and the error of a server that ends before.
    """
    if place.is_running():
        raise _already(place)
    _make_folders(place)
    child = _spawn(place, words, environ)
    while child.poll() is None:
        record = place.read()
        if record and record.pid == child.pid and _answers(record):
            return record
        time.sleep(_POLL_S)
    raise _ended_early(place, child.returncode)


def _make_folders(place: Place) -> None:
    try:
        place.record.parent.mkdir(parents=True, exist_ok=True)
        place.log.open()
    except OSError as error:
        raise not_writable(
            place.cache, error.strerror or type(error).__name__, "NIBBLE_CACHE_DIR"
        ) from None


def _spawn(
    place: Place, words: Sequence[str], environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    # -P keeps the working directory off the path; PYTHONPATH finds nibble in a checkout.
    path = os.pathsep.join(
        filter(None, [str(Path(__file__).resolve().parents[2]), environ.get("PYTHONPATH")])
    )
    with place.log.path.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "nibble", "serve", *words],
            env={**environ, VARIABLE: "1", "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _answers(record: Record) -> bool:
    """Whether this server answers: another may hold the port, in which case this one ends."""
    connection = HTTPConnection("127.0.0.1", record.control_port, timeout=2)
    try:
        connection.request("GET", "/status")
        return json.loads(connection.getresponse().read())["pid"] == record.pid
    except (OSError, HTTPException, ValueError, LookupError, TypeError, RecursionError):
        return False
    finally:
        connection.close()


def _already(place: Place) -> NibbleError:
    record = place.read()
    who = f" (pid {record.pid}, {record.model})" if record else ""
    what = f"a server already runs in the background on port {place.port}{who}"
    return NibbleError(
        ExitCode.CONFIG,
        what=what,
        action=f"run `nibble stop --port {place.port}`, or set another PORT",
    )


def _ended_early(place: Place, code: int) -> NibbleError:
    """The server's error line, from its log."""
    prefix = "nibble: error: "
    said = [line for line in place.log.tail(50)[0] if line.startswith(prefix)]
    what = (
        said[-1].removeprefix(prefix)
        if said
        else f"it ended with code {code}; see `nibble logs --port {place.port}`"
    )
    known = code in set(ExitCode) and code != ExitCode.OK
    return NibbleError(ExitCode(code) if known else ExitCode.INTERNAL, what=what)


# --- in the server ---


@contextlib.contextmanager
def registered(
    place: Place, model: str, control_port: int, drain_s: int
) -> Iterator[Callable[[int], None]]:
    """Hold the port's lock and keep the record while a background server runs; yields the function
    that records its exit code.
    """
    try:
        descriptor = os.open(place.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise not_writable(
            place.lock, error.strerror or type(error).__name__, "NIBBLE_CACHE_DIR"
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _already(place) from None
        record = Record(
            os.getpid(), this_process(), place.port, control_port, drain_s, model, time.time()
        )
        place.write(record)
        yield lambda code: note_end(place, code)
    finally:
        os.close(descriptor)


def note_end(place: Place, code: int) -> None:
    """Record this process's exit code, if it is the background server of that port."""
    record = place.read()
    if record is not None and record.pid == os.getpid():
        place.write(replace(record, exit_code=int(code)))


# --- nibble stop ---


def stop(place: Place) -> tuple[int, str]:
    """End the server of this port as SIGTERM does: (its exit code, the message). 0 without a
    server.
    """
    record = place.read()
    if not place.is_running():
        return ExitCode.OK, _not_running(place, record)
    if record is None or ended_without_exit_code(record.process, this_process()):
        what = f"the server on port {place.port} has no readable record"
        raise NibbleError(
            ExitCode.CONFIG, what=what, action="find it with `ps` and send it SIGTERM"
        )
    if record.process.split(" ")[1] != this_process().split(" ")[1]:
        what = (
            f"the server on port {place.port} runs in another container or host"
            f" ({record.process.split(' ')[1]})"
        )
        raise NibbleError(ExitCode.CONFIG, what=what, action="run `nibble stop` there")
    try:
        os.kill(record.pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError:
        what = f"pid {record.pid} on port {place.port} belongs to another user"
        raise NibbleError(
            ExitCode.CONFIG, what=what, action="run `nibble stop` as that user"
        ) from None
    return _wait(place, record)


def _wait(place: Place, record: Record) -> tuple[int, str]:
    limit_s = record.drain_s + STOP_MARGIN_S
    deadline = time.monotonic() + limit_s
    while place.is_running():
        if time.monotonic() > deadline:
            what = f"pid {record.pid} still runs {limit_s:.0f} s after SIGTERM"
            raise NibbleError(
                ExitCode.TERMINATED,
                what=what,
                action=f"run `kill -9 {record.pid}`; `nibble logs` may show the cause",
            )
        time.sleep(_POLL_S)
    after = place.read()
    code = after.exit_code if after and after.pid == record.pid else None
    place.record.unlink(missing_ok=True)
    if code is None:
        return ExitCode.INTERNAL, f"pid {record.pid} ended without an exit code"
    return code, f"pid {record.pid} on port {place.port} ended with code {code}"


def _not_running(place: Place, record: Record | None) -> str:
    if record is None:
        # `nibble serve` says that `nibble stop` ends what holds a port
        held = (
            "; the one in the foreground ends with Ctrl-C or SIGTERM" if is_held(place.port) else ""
        )
        return f"no server runs in the background on port {place.port}{held}"
    with contextlib.suppress(OSError):  # another user's
        place.record.unlink(missing_ok=True)
    how = "without an exit code" if record.exit_code is None else f"with code {record.exit_code}"
    return f"no server runs in the background on port {place.port}: pid {record.pid} ended {how}"


# --- nibble logs ---


def show_logs(place: Place, lines: int, follow: bool) -> None:
    """Print the last `lines`, and with `follow` new ones until the server ends. Raises USAGE
    without a log.
    """
    try:
        place.log.path.open("rb").close()
    except FileNotFoundError:
        what = f"no background server has run on port {place.port}"
        raise NibbleError(
            ExitCode.USAGE,
            what=what,
            action="start one with `nibble serve --detach`, or give its --port",
        ) from None
    except OSError as error:
        what = f"{place.log.path} cannot be read ({error.strerror})"
        raise NibbleError(
            ExitCode.CONFIG, what=what, action="run `nibble logs` as the user who started it"
        ) from None
    last, end = place.log.tail(lines)
    print(_shown("\n".join(last)), flush=True)
    if follow:
        for text in place.log.follow(end, lambda: not place.is_running()):
            print(_shown(text), end="", flush=True)


def _shown(text: str) -> str:
    """A log line without terminal control sequences: a log holds users' input."""
    return printable(text.replace("\r\n", "\n").replace("\r", "\n"))

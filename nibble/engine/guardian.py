"""Ends vLLM when nibble is killed (`kill -9`, OOM killer): a small process that waits for it.

It reads a pipe whose other end nibble holds. An orderly end writes DONE; an end of file alone means
that nibble is gone. vLLM would otherwise drain for NIBBLE_DRAIN_SECONDS with clients that nothing
stops. Run as `python -m nibble.engine.guardian`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from nibble.machine.process_table import Process, kill_until_gone, processes
from nibble.machine.processes import STOP_SIGNALS, started_ticks

MARK = "NIBBLE_RUN"  # in the environment of vLLM and of all that it starts
DONE = b"done"
END_S = 10.0
_KEPT = ("LD_LIBRARY_PATH", "PATH")  # no secret is in what a user may see of it


class Guardian:
    """Started by nibble for one run of vLLM, whose API process `session` is. `folder` is removed
    too.
    """

    def __init__(self, session: int, mark: str, folder: Path | None) -> None:
        words = [str(session), started_ticks(session), mark, str(folder or "")]
        # `-S` leaves out the .pth files of site-packages, so its folder is named for psutil.
        roots = [Path(__file__).resolve().parents[2], Path(psutil.__file__).resolve().parents[1]]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-S", "-m", "nibble.engine.guardian", *words],
            env={name: os.environ[name] for name in _KEPT if name in os.environ}
            | {"PYTHONPATH": os.pathsep.join(map(str, roots))},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a signal to nibble's process group is not for it
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def dismiss(self) -> None:
        """Nothing is left to guard."""
        if self._process.poll() is not None:
            return
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.communicate(DONE, timeout=2)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def members(session: int, started: str, mark: str) -> list[Process]:
    """Living processes of a run: of its session, with its mark in the environment, and their
    descendants.
    """
    table = {process.pid: process for process in processes()}
    # Another process may have the number by now.
    has_session = session not in table or started_ticks(session) == started
    found = {
        process.pid
        for process in table.values()
        if (has_session and process.session == session) or _is_marked(process.pid, mark)
    }
    while more := {
        one.pid for one in table.values() if one.parent in found and one.pid not in found
    }:
        found |= more
    return [table[pid] for pid in found if pid != os.getpid()]


def _is_marked(pid: int, mark: str) -> bool:
    """vLLM's titles overwrite a process's environment in /proc; those are found by their
    session.
    """
    try:
        return psutil.Process(pid).environ().get(MARK) == mark
    except psutil.Error:
        return False


def main(words: list[str]) -> None:
    """Wait, and act where nibble is gone."""
    session, started, mark, folder = words
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    if sys.stdin.buffer.read() == DONE:
        return
    with contextlib.suppress(OSError):  # the reader may be gone too
        os.write(2, b"[nibble] nibble was killed: ending vLLM at once\n")
    kill_until_gone(lambda: members(int(session), started, mark), END_S)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Handles a stop signal before a server begins: one line and exit 0. Import it before all else."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

# `nibble.machine.processes` has them too, but its imports take the time that this module covers.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
VERBS = ("serve", "ray-head", "ray-worker")
# The interpreter waits for threads that an interrupted import or library has left; not longer.
LONGEST_END_S = 10
_told = 0
_is_over = False


def stop_early(words: list[str]) -> None:
    """Handle stop signals from now on if `words` (the command line) start a server in the
    foreground.

    entrypoint.sh may have blocked them, so that no signal is lost or kills before this line.
    """
    if words[:1] and words[0] in VERBS and "--detach" not in words:
        for one in SIGNALS:
            if (
                signal.getsignal(one) != signal.SIG_IGN or one == signal.SIGTERM
            ):  # nohup ignores SIGHUP: keep it
                signal.signal(one, _stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def told() -> int:
    """The signal that arrived, or 0. A handler's exception can get lost, as in a destructor."""
    return _told


def over() -> None:
    """Call it when the server has ended: a later signal has no effect."""
    global _is_over
    _is_over = True


def _stop(signum: int, frame: FrameType | None) -> None:
    global _told
    if _is_over:
        return
    if not _told:
        line = (
            f"[nibble] {signal.Signals(signum).name} before the start: stopped; no server was"
            " running\n"
        )
        os.write(sys.stderr.fileno() if sys.stderr else 2, line.encode())
        signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
        signal.alarm(LONGEST_END_S)
    _told = signum
    raise SystemExit(0)

"""Stops vLLM: waits until it runs no request, signals it, and waits for its end. A signal or its
death ends the wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from nibble.engine.log import DrainReader
from nibble.engine.process import Ended, Event, Stop
from nibble.errors import ExitCode
from nibble.machine.processes import signal_name
from nibble.serve.unread import Unread
from nibble.settings.options import Settings

# After the last answer; vLLM took 4.5 s on two cores, and 60 s are allowed by compose and units.
TEARDOWN_S = 10.0
Next = Callable[[float], Event | None]
"""The next event, or None after so many seconds without one."""
_POLL_S = 0.1
_LONGEST_POLL_S = 1.0


def drain(
    event: Stop,
    settings: Settings,
    next_event: Next,
    in_flight: Callable[[], int | None],
    terminate: Callable[[], None],
    log: DrainReader,
    say: Callable[[str], None],
) -> ExitCode | Ended:
    """Let running requests finish, then end vLLM; returns how it ended if it ended before the
    signal.
    """
    limit_s = settings.drain_seconds
    say(
        f"{signal_name(event.signum)}: new requests get 503, running requests may finish for"
        f" {limit_s} s"
    )
    deadline = time.monotonic() + limit_s
    left = until_none_runs(next_event, in_flight, deadline)
    if isinstance(left, Ended):
        return left
    cut = ""
    if isinstance(left, Stop):
        cut = f"{signal_name(left.signum)} again"
    elif left:
        cut = f"{left} request(s) were unfinished after {limit_s} s"
    else:
        terminate()
        unread = Unread(settings.port)
        end = until_it_ends(next_event, log, deadline + TEARDOWN_S, unread, deadline)
        cut = _unfinished(end, log, unread.clients(time.monotonic()), limit_s)
    say(f"ended before the drain was done: {cut}" if cut else "drained and stopped")
    return ExitCode.TERMINATED if cut else ExitCode.OK


def _unfinished(end: Ended | Stop | None, log: DrainReader, clients: str, limit_s: float) -> str:
    """The requests that were unfinished when vLLM ended or the drain gave up, or ""."""
    if isinstance(end, Stop):
        return f"{signal_name(end.signum)} again"
    if log.cut:
        return f"vLLM ended with {log.cut} request(s) unfinished"
    if end is not None or log.http_is_down:
        return ""
    if clients:
        return f"clients have not read their answers: {clients}"
    return f"vLLM had not closed its connections {limit_s + TEARDOWN_S:.0f} s after the signal"


def until_none_runs(
    next_event: Next, in_flight: Callable[[], int | None], deadline: float
) -> int | Ended | Stop:
    """Until the engines hold no request: 0, or how many at the deadline (monotonic), or an event
    before.

    vLLM's drain covers neither several API processes (each drops its engine connection at SIGTERM,
    vllm 0.32 launcher.py handle_shutdown) nor requests in parts (beam search, tool loops), so
    nibble signals when nothing runs. It needs zero twice: a request may be on its way from the API
    process to the engine. 0 also if /metrics does not answer (None); then only vLLM's drain acts.
    """
    zeros = unknown = count = 0
    pause_s = _POLL_S
    while zeros < 2 and unknown < 3:
        if (now := time.monotonic()) >= deadline:
            return count
        event = next_event(min(pause_s, deadline - now))
        if isinstance(event, Ended | Stop):
            return event
        found = in_flight()
        unknown = unknown + 1 if found is None else 0
        zeros = zeros + 1 if found == 0 else 0
        count = found or 0
        # Longer pauses while requests run: each look is a line in vLLM's access log.
        pause_s = _POLL_S if zeros else min(pause_s * 1.5, _LONGEST_POLL_S)
    return 0


def until_it_ends(
    next_event: Next,
    log: DrainReader,
    deadline: float,
    unread: Unread | None = None,
    unread_until: float = 0.0,
) -> Ended | Stop | None:
    """Wait for the child's end, another signal, the deadline (None), or the end of vLLM's drain
    (None).

    After `unread_until` it also returns None if only clients that do not read are left: vLLM would
    wait for them.
    """
    looked_at = float("-inf")
    while (left_s := deadline - (now := time.monotonic())) > 0:
        event = next_event(min(left_s, _POLL_S))
        if isinstance(event, Ended | Stop):
            return event
        # Its engine killed at --shutdown-timeout, vLLM 0.32 waits for the broken streams without
        # end.
        if log.gave_up:
            return None
        if unread is not None and not log.http_is_down and now - looked_at >= _LONGEST_POLL_S:
            looked_at = now
            unread.look(now)
            if now >= unread_until and unread.clients(now):
                return None
    return None

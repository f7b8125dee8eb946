"""The waits of a stop: until vLLM runs no request any more, and until it has ended. Signals and deaths in between end them."""

from __future__ import annotations

import time
from collections.abc import Callable

from nibble.engine import Ended, Event, Stop
from nibble.phases import DrainReader

Next = Callable[[float], Event | None]
"""The next event, or None after so many seconds without one."""
_POLL_S = 0.1
_LONGEST_POLL_S = 1.0


def until_none_runs(
    next_event: Next, in_flight: Callable[[], int | None], deadline: float
) -> int | Ended | Stop:
    """Until the engines hold no request: 0, or how many at the deadline (monotonic); or what came in between.

    vLLM's own drain covers neither several API processes (each drops its engine connection at SIGTERM, vllm 0.32
    launcher.py handle_shutdown) nor requests that come in parts (beam search, tool loops), so the signal
    goes out when nothing runs any more. Twice zero: a request may be on its way from the API process to
    the engine. 0 also where /metrics does not answer (None); vLLM's drain is then all there is.
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


def until_it_ends(next_event: Next, log: DrainReader, deadline: float) -> Ended | Stop | None:
    """The child's end, another signal, or None at the deadline (or once vLLM gave its own drain up)."""
    while (left_s := deadline - time.monotonic()) > 0:
        event = next_event(min(left_s, _POLL_S))
        if isinstance(event, Ended | Stop):
            return event
        # Its engine killed at --shutdown-timeout, vLLM 0.32 waits for the broken streams without end.
        if log.gave_up:
            return None
    return None

"""The wait of a crash loop: the process stays, gives the reason, answers /status; a stop signal
ends it.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import UTC, datetime
from typing import Any

from nibble.machine.processes import stop_signals
from nibble.serve.control import ControlServer

POLL_S = 1.0


def hold(control_port: int, seconds: float, why: str) -> bool:
    """Wait; True when the time is over, False after a signal. Call it from the main thread."""
    told, until = threading.Event(), time.monotonic() + seconds
    since = datetime.now(UTC).isoformat(timespec="seconds")

    def status() -> dict[str, Any]:
        left_s = round(max(0.0, until - time.monotonic()), 1)
        found = {
            "state": "holding",
            "phase": "hold",
            "progress": None,
            "detail": why,
            "since": since,
        }
        return found | {"seconds_left": left_s, "pid": os.getpid()}

    control = ControlServer(control_port, status, lambda: False)
    control.start()
    try:
        with stop_signals(lambda signum: told.set()):
            # In short waits: a signal that comes just before one is seen when it is over.
            while (left_s := until - time.monotonic()) > 0:
                if told.wait(min(left_s, POLL_S)):
                    return False
            return True
    finally:
        control.close()

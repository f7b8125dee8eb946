"""systemd's notify protocol (sd_notify(3)): readiness, status, and a watchdog beat while nibble
works.

It does nothing without NOTIFY_SOCKET. With `WatchdogSec=`, systemd ends a server whose supervisor
hangs.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping

BEATS = 3  # within the time that systemd allows
_ANSWER_S = 2.0


class Notifier:
    """Sends to the socket that `environ` names."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "").replace("@", "\0", 1)
        is_ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        given = environ.get("WATCHDOG_USEC", "") if is_ours and self._address else ""
        self.watchdog_s = int(given) / 1e6 if given.isdigit() else 0.0

    def send(self, *lines: str) -> None:
        """Send `READY=1`, `STATUS=…`; without the socket the server continues."""
        if not self._address:
            return
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
        ):
            sender.settimeout(1)
            sender.connect(self._address)
            sender.send("\n".join(lines).encode())


class Heartbeat:
    """Reports to systemd that the supervisor works: its main loop turns and its control port
    answers.
    """

    def __init__(
        self, notifier: Notifier, control_port: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._notifier, self._control_port, self._clock = notifier, control_port, clock
        self._turned_at = clock()

    def turn(self) -> None:
        """Record that the main loop runs."""
        self._turned_at = self._clock()

    def run(self, over: threading.Event) -> None:
        """Send heartbeats until `over`; return at once without a watchdog."""
        limit_s = self._notifier.watchdog_s
        while limit_s and not over.wait(limit_s / BEATS):
            if self._clock() - self._turned_at < limit_s and self._answers():
                self._notifier.send("WATCHDOG=1")

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._control_port, timeout=_ANSWER_S)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status in (200, 503)
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

"""Limits the connections of an API process, and the time one may take to send a request.

uvicorn 0.54 closes a connection that idles after an answer (VLLM_HTTP_TIMEOUT_KEEP_ALIVE, 5 s) and
nothing else: one that never sends a request, or half of one, stays for ever.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from nibble.engine.gate.state import GateState
from nibble.engine.guard.limits import RequestLimits
from nibble.engine.guard.protocol import GuardedProtocol, httptools_config

# uvicorn's 16 MiB of JSON take vLLM's event loop 2.6 s to parse. 24 s of audio at 16 kHz in base64
# are as large as this.
WEBSOCKET_MESSAGE_BYTES = 1 << 20
_SWEEP_S = 0.25
# The age at which a connection without a whole request ends in a drain: nibble's own requests come
# whole.
_DRAIN_AGE_S = 0.5


def guard_connections(app: Any, limits: RequestLimits, state: GateState) -> None:
    """Put GuardedProtocol into the uvicorn server of `app`, before it listens. Raises
    MissingAttribute.

    vLLM 0.32 sets `app.state.server` before it serves (launchers/launcher.py:232), and uvicorn 0.54
    runs the lifespan before it listens and asks its config for the class at each connection
    (server.py startup).
    """
    config = httptools_config(app)
    connections = Connections(limits, state)
    config.ws_max_size = min(config.ws_max_size, WEBSOCKET_MESSAGE_BYTES)
    config.http_protocol_class = functools.partial(GuardedProtocol, guard=connections)
    connections.sweep()


class Connections:
    """All connections, and apart those that have sent no whole request, the one that waits
    longest first.
    """

    def __init__(self, limits: RequestLimits, state: GateState) -> None:
        self.limits = limits
        self._state = state
        self._total = 0
        self._waiting: dict[GuardedProtocol, None] = {}
        self._waiting_at: dict[str, dict[GuardedProtocol, None]] = {}
        self._count_at: dict[str, int] = {}
        self._last_sweep = 0.0

    def add(self, connection: GuardedProtocol) -> bool:
        """Count it; False where it is over the limits and no other connection can give way."""
        address = connection.address
        limits = self.limits
        is_full = (
            self._count_at.get(address, 0) >= limits.max_connections_per_address
            and not self._close_oldest(self._waiting_at.get(address, {}))
        ) or (self._total >= limits.max_connections and not self._close_oldest(self._waiting))
        self._total += 1
        self._count_at[address] = self._count_at.get(address, 0) + 1
        self.wait_for_request(connection)
        return not is_full

    def remove(self, connection: GuardedProtocol) -> None:
        """It is closed."""
        self.has_request(connection)
        address = connection.address
        self._total -= 1
        self._count_at[address] -= 1
        if not self._count_at[address]:
            del self._count_at[address]
            self._waiting_at.pop(address, None)

    def wait_for_request(self, connection: GuardedProtocol) -> None:
        """It has not sent the whole of its (next) request."""
        self._waiting[connection] = None
        self._waiting_at.setdefault(connection.address, {})[connection] = None

    def has_request(self, connection: GuardedProtocol) -> None:
        """Its request is whole: it is vLLM's turn."""
        self._waiting.pop(connection, None)
        self._waiting_at.get(connection.address, {}).pop(connection, None)

    def sweep(self) -> None:
        """Close what is late, and in a drain all that has sent no whole request. Runs every
        _SWEEP_S.
        """
        loop = asyncio.get_running_loop()
        # First, so that an exception below ends one sweep and not all
        loop.call_later(_SWEEP_S, self.sweep)
        now = loop.time()
        # After a standstill of the event loop, what arrived meanwhile is read first.
        is_late = now - self._last_sweep > 4 * _SWEEP_S
        self._last_sweep = now
        if not is_late:
            drains = self._state.get()[0] == "draining"
            for connection in list(self._waiting):
                if connection.deadline < now or (
                    drains and now - connection.waits_since > _DRAIN_AGE_S
                ):
                    connection.expire("draining" if drains else "late")

    def _close_oldest(self, waiting: dict[GuardedProtocol, None]) -> bool:
        oldest = next(iter(waiting), None)
        if oldest is None:
            return False
        self.has_request(oldest)  # it gives way once
        oldest.transport.abort()
        return True

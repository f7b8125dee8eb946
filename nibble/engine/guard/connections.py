"""Limits the number of connections of an API process, and the time to send a request.

uvicorn 0.54 closes only connections that are idle after an answer (VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
5 s). A connection without a request, or with half of a request, would stay open.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from nibble.engine.gate.state import GateState
from nibble.engine.guard.limits import RequestLimits
from nibble.engine.guard.protocol import GuardedProtocol, httptools_config

# With uvicorn's default of 16 MiB, vLLM's event loop parses one message for 2.6 s. 1 MiB holds 24 s
# of audio at 16 kHz in base64.
WEBSOCKET_MESSAGE_BYTES = 1 << 20
_SWEEP_S = 0.25
# In a drain, a connection without a whole request is closed at this age. nibble's requests arrive
# whole, so they are not affected.
_DRAIN_AGE_S = 0.5


def guard_connections(app: Any, limits: RequestLimits, state: GateState) -> None:
    """Make the uvicorn server of `app` use GuardedProtocol. Raises MissingAttribute.

    Called during the lifespan's startup: vLLM 0.32 has then set `app.state.server`
    (launchers/launcher.py:232), and uvicorn 0.54 does not listen yet. uvicorn reads the class from
    its config at each connection (server.py startup).
    """
    config = httptools_config(app)
    connections = Connections(limits, state)
    config.ws_max_size = min(config.ws_max_size, WEBSOCKET_MESSAGE_BYTES)
    config.http_protocol_class = functools.partial(GuardedProtocol, guard=connections)
    connections.sweep()


class Connections:
    """Counts all connections, and lists those without a whole request, oldest first."""

    def __init__(self, limits: RequestLimits, state: GateState) -> None:
        self.limits = limits
        self._state = state
        self._total = 0
        self._waiting: dict[GuardedProtocol, None] = {}
        self._waiting_at: dict[str, dict[GuardedProtocol, None]] = {}
        self._count_at: dict[str, int] = {}
        self._last_sweep = 0.0

    def add(self, connection: GuardedProtocol) -> bool:
        """Count a new connection. False if a limit is reached and no waiting one can be closed."""
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
        """The connection is closed."""
        self.has_request(connection)
        address = connection.address
        self._total -= 1
        self._count_at[address] -= 1
        if not self._count_at[address]:
            del self._count_at[address]
            self._waiting_at.pop(address, None)

    def wait_for_request(self, connection: GuardedProtocol) -> None:
        """The connection has not sent the whole of its (next) request."""
        self._waiting[connection] = None
        self._waiting_at.setdefault(connection.address, {})[connection] = None

    def has_request(self, connection: GuardedProtocol) -> None:
        """The connection's request is whole: deadlines no longer apply."""
        self._waiting.pop(connection, None)
        self._waiting_at.get(connection.address, {}).pop(connection, None)

    def sweep(self) -> None:
        """Close connections past their deadline; in a drain, all without a whole request.

        Runs every _SWEEP_S seconds.
        """
        loop = asyncio.get_running_loop()
        # First, so that an exception below ends only this sweep.
        loop.call_later(_SWEEP_S, self.sweep)
        now = loop.time()
        # If the event loop was blocked, it first reads the data that arrived meanwhile.
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
        self.has_request(oldest)  # removes it from the lists
        oldest.transport.abort()
        return True

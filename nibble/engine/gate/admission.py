"""Changes the server's state, and with it which requests the gate admits, one thread at a time."""

from __future__ import annotations

import threading
from pathlib import Path

from nibble.engine.gate.state import GateState, State


class Admission:
    """The state and its file at `path`. The lock is held only briefly, for the watchdog's sake."""

    def __init__(self, path: Path) -> None:
        self._gate = GateState.create(path)
        self._lock = threading.Lock()
        self.path = path
        self.state: State = "starting"
        self.phase = ""

    def set(self, state: State, phase: str) -> None:
        """Change to `state` from any state. The gate reports `phase`."""
        with self._lock:
            self.state, self.phase = state, phase
            self._gate.set(state, phase)

    def change(self, before: State, after: State, phase: str) -> bool:
        """Change from `before` to `after`. False if the state is no longer `before`."""
        with self._lock:
            if self.state != before:
                return False
            self.state, self.phase = after, phase
            self._gate.set(after, phase)
            return True

    def close(self) -> None:
        """Unmap the state file."""
        self._gate.close()

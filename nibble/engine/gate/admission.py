"""Who may send requests: the server's state, changed by one thread at a time."""

from __future__ import annotations

import threading
from pathlib import Path

from nibble.engine.gate.state import GateState, State


class Admission:
    """The state and its file at `path`. The lock is held for moments only, so that the watchdog
    may take it too.
    """

    def __init__(self, path: Path) -> None:
        self._gate = GateState.create(path)
        self._lock = threading.Lock()
        self.path = path
        self.state: State = "starting"
        self.phase = ""

    def set(self, state: State, phase: str) -> None:
        """Change the state from any other; the gate reports `phase`."""
        with self._lock:
            self.state, self.phase = state, phase
            self._gate.set(state, phase)

    def change(self, before: State, after: State, phase: str) -> bool:
        """From one state to another, unless it has changed meanwhile."""
        with self._lock:
            if self.state != before:
                return False
            self.state, self.phase = after, phase
            self._gate.set(after, phase)
            return True

    def close(self) -> None:
        """Let go of the file."""
        self._gate.close()

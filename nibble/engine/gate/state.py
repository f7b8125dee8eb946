"""The state file that supervisor and gate share: starting, ready, paused or draining.

Both processes map the file. The supervisor writes it (`create`, `set`). The gate, inside each vLLM
API process, reads it once per request (`open`, `get`, about a microsecond). A file that cannot be
read counts as "starting", so a gate without a supervisor refuses requests.
"""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path
from typing import Literal

State = Literal["starting", "ready", "draining", "paused"]

# Layout of fixed size: magic, one state byte, the phase in UTF-8 padded with NUL. Another process
# cannot read one byte half-written. It can read a half-written phase, which is only for people.
_MAGIC = b"nblgate1"
_STATE_OFFSET = len(_MAGIC)
_PHASE_OFFSET = _STATE_OFFSET + 1
PHASE_BYTES = 119
FILE_BYTES = _PHASE_OFFSET + PHASE_BYTES

_CODES: dict[State, int] = {"starting": 0, "ready": 1, "draining": 2, "paused": 3}
_STATES: dict[int, State] = {code: state for state, code in _CODES.items()}
_CLOSED: tuple[State, str] = ("starting", "")


class GateState:
    """A mapping of the state file. Use `create` for the writer and `open` for a reader."""

    def __init__(self, path: Path, mapped: mmap.mmap | None, writable: bool) -> None:
        self.path = path
        self._mapped = mapped
        self._writable = writable
        self._last_bytes = b""
        self._last: tuple[State, str] = _CLOSED

    @classmethod
    def create(cls, path: str | Path) -> GateState:
        """Create the state file (mode 0600, state "starting"), replace an old one, and map it.

        The file is written under another name and then renamed, so readers see only whole files.
        Raises OSError if the folder is not writable.
        """
        path = Path(path)
        scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(
            scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            os.write(descriptor, _MAGIC.ljust(FILE_BYTES, b"\0"))
            mapped = mmap.mmap(descriptor, FILE_BYTES)
            os.replace(scratch, path)
        except OSError:
            scratch.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return cls(path, mapped, writable=True)

    @classmethod
    def open(cls, path: str | Path) -> GateState:
        """A reader. Never fails: `get` tries again to open a missing file."""
        path = Path(path)
        return cls(path, _map_for_reading(path), writable=False)

    def set(self, state: State, phase: str) -> None:
        """Write `state` and at most PHASE_BYTES of `phase`. Raises RuntimeError in a reader."""
        if self._mapped is None or not self._writable:
            raise RuntimeError(f"the gate state {self.path} is not open for writing")
        text = phase.encode()[:PHASE_BYTES].decode(errors="ignore").encode()
        self._mapped[_PHASE_OFFSET:FILE_BYTES] = text.ljust(PHASE_BYTES, b"\0")
        # Last, so that a reader of the new state also reads its phase.
        self._mapped[_STATE_OFFSET] = _CODES[state]

    def get(self) -> tuple[State, str]:
        """The current (state, phase); ("starting", "") if the file cannot be read."""
        if self._mapped is None:
            self._mapped = _map_for_reading(self.path)
            if self._mapped is None:
                return _CLOSED
        current = self._mapped[_STATE_OFFSET:FILE_BYTES]
        if current != self._last_bytes:
            phase = current[1:].rstrip(b"\0").decode(errors="replace")
            self._last = (_STATES.get(current[0], "starting"), phase)
            self._last_bytes = current
        return self._last

    def close(self) -> None:
        """Unmap the file, without removing it."""
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None


def _map_for_reading(path: Path) -> mmap.mmap | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        # Reading a mapping beyond the end of its file kills the process with SIGBUS.
        if os.fstat(descriptor).st_size != FILE_BYTES:
            return None
        mapped = mmap.mmap(descriptor, FILE_BYTES, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    if mapped[:_STATE_OFFSET] != _MAGIC:
        mapped.close()
        return None
    return mapped

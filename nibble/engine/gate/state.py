"""The state file that supervisor and gate share: starting, ready, paused or draining.

A file mapped by both sides. The supervisor writes it (`create`, `set`); the gate, inside each vLLM
API process, reads it once per request (`open`, `get`, about a microsecond). Everything that cannot
be read counts as "starting", so a gate without its supervisor stays closed.
"""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path
from typing import Literal

State = Literal["starting", "ready", "draining", "paused"]

# Layout, fixed size: magic, one state byte, then the phase as UTF-8 padded with NUL. The state is
# one byte because one byte cannot be read half-written by another process; the phase is for people
# and may be.
_MAGIC = b"nblgate1"
_STATE_OFFSET = len(_MAGIC)
_PHASE_OFFSET = _STATE_OFFSET + 1
PHASE_BYTES = 119
FILE_BYTES = _PHASE_OFFSET + PHASE_BYTES

_CODES: dict[State, int] = {"starting": 0, "ready": 1, "draining": 2, "paused": 3}
_STATES: dict[int, State] = {code: state for state, code in _CODES.items()}
_CLOSED: tuple[State, str] = ("starting", "")


class GateState:
    """One mapping of the state file; made with `create` (writer) or `open` (reader)."""

    def __init__(self, path: Path, mapped: mmap.mmap | None, writable: bool) -> None:
        self.path = path
        self._mapped = mapped
        self._writable = writable
        self._last_bytes = b""
        self._last: tuple[State, str] = _CLOSED

    @classmethod
    def create(cls, path: str | Path) -> GateState:
        """A new state file (mode 0600, state "starting") in place of any old one, mapped for
        writing.

        Readers never see it half-made: it is filled under another name and renamed. OSError where
        the folder cannot be written.
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
        """A reader. Never fails: a missing file is looked for again at each `get`."""
        path = Path(path)
        return cls(path, _map_for_reading(path), writable=False)

    def set(self, state: State, phase: str) -> None:
        """Publish `state`; `phase` is cut to PHASE_BYTES of UTF-8. Only for the creator
        (RuntimeError otherwise).
        """
        if self._mapped is None or not self._writable:
            raise RuntimeError(f"the gate state {self.path} is not open for writing")
        text = phase.encode()[:PHASE_BYTES].decode(errors="ignore").encode()
        self._mapped[_PHASE_OFFSET:FILE_BYTES] = text.ljust(PHASE_BYTES, b"\0")
        self._mapped[_STATE_OFFSET] = _CODES[
            state
        ]  # last: a reader of the new state finds its phase

    def get(self) -> tuple[State, str]:
        """The current (state, phase); ("starting", "") where there is nothing readable."""
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
        """Unmap. The file stays: its folder is not removed here."""
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None


def _map_for_reading(path: Path) -> mmap.mmap | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        # The size is checked first: reading a mapping beyond the end of its file kills the process
        # (SIGBUS).
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

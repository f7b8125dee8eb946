"""The log of a background server: a file that the server rotates and `nibble logs` reads."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MAX_BYTES = 16 << 20
KEPT = 4  # older files beside the current one
_CHECK_S = 2.0
_POLL_S = 0.2


@dataclass(frozen=True)
class LogFile:
    """`path` is the current file, `path`.1 the newest older one. Only the owner reads it: it may
    hold requests.
    """

    path: Path
    max_bytes: int = MAX_BYTES

    def older(self) -> list[Path]:
        """The rotated files, oldest first."""
        return [old for number in range(KEPT, 0, -1) if (old := self._numbered(number)).exists()]

    def open(self) -> None:
        """Open the file; rotate it first if it is too large."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.rotate()
        os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))

    def rotate(self) -> bool:
        """Rotate a file that is too large; returns whether it was."""
        if not self.path.exists() or self.path.stat().st_size < self.max_bytes:
            return False
        for number in range(KEPT, 1, -1):
            with contextlib.suppress(FileNotFoundError):
                self._numbered(number - 1).replace(self._numbered(number))
        self.path.replace(self._numbered(1))
        return True

    def rotate_output(self) -> None:
        """Rotate the file and continue this process's stdout and stderr in the new one."""
        if self.rotate():
            fresh = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for ours in (1, 2):
                os.dup2(fresh, ours)
            os.close(fresh)

    def keep_rotating(self) -> None:
        """Check every two seconds in a separate thread, only after the fork of the engine."""

        def watch() -> None:
            while True:
                with contextlib.suppress(OSError):  # a full disk; the next try may succeed
                    self.rotate_output()
                time.sleep(_CHECK_S)

        threading.Thread(target=watch, name="log-rotation", daemon=True).start()

    def tail(self, lines: int) -> tuple[list[str], int]:
        """The last lines, older files included, and the byte in the current file where they end."""
        last: deque[bytes] = deque(maxlen=lines)
        end = 0
        for path in [*self.older(), self.path]:
            with contextlib.suppress(OSError), path.open("rb") as file:
                last.extend(file)
                end = file.tell()
        return [line.decode(errors="replace").rstrip("\n") for line in last], end

    def follow(self, begin: int, is_over: Callable[[], bool]) -> Generator[str, None, None]:
        """Lines of the current file from byte `begin` on, through rotations, until `is_over` and
        all is read.
        """
        file = self.path.open("rb")
        try:
            file.seek(begin)
            while True:
                ending = is_over()
                if data := file.read():
                    yield data.decode(errors="replace")
                elif newer := self._newer(file):
                    # Written since, and before it was moved
                    yield file.read().decode(errors="replace")
                    file.close()
                    file = newer
                elif ending:
                    return
                else:
                    time.sleep(_POLL_S)
        finally:
            file.close()

    def _newer(self, file: BinaryIO) -> BinaryIO | None:
        """The file that followed this one, opened; the oldest kept file if this one is deleted.

        Files are opened from the newest on: a rotation meanwhile repeats a file and never skips
        one.
        """
        opened: dict[int, BinaryIO] = {}
        for path in [self.path, *(self._numbered(number) for number in range(1, KEPT + 1))]:
            with contextlib.suppress(FileNotFoundError):
                found = path.open("rb")
                if opened.setdefault(os.fstat(found.fileno()).st_ino, found) is not found:
                    found.close()
        oldest_first = list(reversed(opened))
        ours = os.fstat(file.fileno()).st_ino
        place = oldest_first.index(ours) + 1 if ours in opened else 0
        newer = opened.pop(oldest_first[place]) if place < len(oldest_first) else None
        for other in opened.values():
            other.close()
        return newer

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

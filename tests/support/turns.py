"""How many tests compute at a time, whatever the number of processes that run tests.

Half of the unit tests' time is waiting, so three processes suit two cores. A start of vLLM
computes: a third one beside two others only makes all of them slower, and time limits fail.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

AT_ONCE = 2


class Turns:
    """One process's part: at most AT_ONCE processes that share `folder` are inside at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: ExitStack | None = None

    def take(self) -> None:
        """Wait for a turn; without effect where this process has one."""
        while not self.is_taken():
            time.sleep(0.1)

    def is_taken(self) -> bool:
        """Take a turn if one is free: whether this process has one now."""
        if self._held is None:
            with ExitStack() as stack:
                files = [
                    stack.enter_context(open(self._folder / f"turn-{number}", "w"))
                    for number in range(AT_ONCE)
                ]
                if any(_is_locked(file.fileno()) for file in files):
                    self._held = stack.pop_all()
        return self._held is not None

    def give_back(self) -> None:
        """Without effect where this process has none."""
        if self._held is not None:
            self._held.close()  # a closed file is unlocked
            self._held = None


def make_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="nibble-turns-"))


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _is_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

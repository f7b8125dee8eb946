"""Errors that a user can act on, as one line with a documented exit code."""

from __future__ import annotations

import re
from enum import IntEnum

from nibble.printable import printable

PASSWORD_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@]*:[^/\s@]+(?=@)")  # a proxy's, a Hub's


class ExitCode(IntEnum):
    """Every exit status nibble uses on purpose (docs/operations.md has the table)."""

    OK = 0  # drained and stopped on request
    INTERNAL = 1  # a defect of nibble; the line names the file with the traceback
    USAGE = 2  # a missing or malformed argument or variable
    NO_HARDWARE = 3  # no hardware that the target or the flags need
    MODEL = 4  # the model is not available, not readable or not complete
    CONFIG = 5  # settings that contradict each other or cannot work
    VERIFY = 6  # a patch, build or benchmark check failed
    NO_FIT = 7  # too little memory, shared memory or disk, or the watchdog stopped vLLM
    CANARY = 8  # wrong kernel or wrong answer
    CLUSTER = 9  # cluster preflight failed
    ENGINE_DIED = 10  # vLLM ended by itself or hung; a client's verb: no server answers
    CRASH_LOOP = 75  # not started after six failures in a row; do not restart
    TERMINATED = 143  # terminated before the drain was done


class NibbleError(Exception):
    """One line for the user, and its exit code.

    `what` is the fact, `expected` completes "expected …", and `action` is the imperative that fixes
    it. `expected` may be empty where it would only repeat the action. `unreachable` marks a failure
    of the network: `nibble plan` goes on without it.
    """

    def __init__(
        self,
        code: ExitCode,
        *,
        what: str,
        expected: str = "",
        action: str = "",
        unreachable: bool = False,
    ) -> None:
        self.code = code
        self.unreachable = unreachable
        self.what = what
        self.expected = expected
        self.action = action
        super().__init__(self.line())

    def line(self) -> str:
        """The message on one line, without control characters and passwords."""
        parts = [self.what]
        if self.expected:
            parts.append(f"expected {self.expected}")
        if self.action:
            parts.append(self.action)
        return PASSWORD_IN_ADDRESS.sub("…", " ".join(printable("; ".join(parts)).split()))

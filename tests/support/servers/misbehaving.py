"""A compiler of structured outputs that misbehaves as a request asks, and such requests."""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nibble.engine.guard.grammar_compile import NeedsBackend, Refusal, TooSlow
from nibble.engine.guard.grammar_worker import Limits

LIMITS = Limits(0.5, 128)


class Config:
    """As much of vLLM's configuration as the worker itself reads."""

    class structured_outputs_config:
        backend = "auto"


class Misbehaving:
    """Stands in for Compiler: `regex` names what to do."""

    vllm_config = Config
    first: str | None = None

    def __init__(self, log: Path) -> None:
        self.log = log
        self.built: set[str] = set()

    def build(self, name: str) -> None:
        self.built.add(name)

    def warm(self) -> None:
        self.built.add("tokenizer")

    def check(self, path: str, fields: dict[str, Any]) -> tuple[str | None, float]:
        if "response_format" in fields:
            return None, 0.0  # the worker's own first look
        act = fields["structured_outputs"]["regex"]
        with self.log.open("a") as log:
            log.write(act + "\n")
        actions: dict[str, Callable[[], Any]] = {
            "spin": lambda: deque(iter(int, 1), maxlen=0),  # forever, in no memory
            "eat": lambda: [bytearray(16 << 20) for _ in range(1 << 20)],
            "crash in C": lambda: ctypes.memset(ctypes.CDLL(None).malloc(1), 0, 1 << 40),
            "abort": os.abort,
            "refuse": self._refuse,
            "needs": self._needs,
            "read slowly": self._read_slowly,
            "warm?": lambda: None if "tokenizer" in self.built else self._refuse(),
            "slow": lambda: time.sleep(0.2),
            "stopped": lambda: time.sleep(1),
        }
        actions.get(act, lambda: None)()
        return self.first, 0.05 if act == "long to read" else 0.0

    def _refuse(self) -> None:
        raise Refusal("It allows no token at all.")

    def _read_slowly(self) -> None:
        raise TooSlow("It takes 0.11 s to read; expected at most 0.1 s.")

    def _needs(self) -> None:
        if "guidance" not in self.built:
            raise NeedsBackend("guidance")


def regex(text: str) -> dict[str, Any]:
    """The body of a request with that action."""
    return {"model": "m", "messages": [], "structured_outputs": {"regex": text}}

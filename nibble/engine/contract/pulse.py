"""What the plugin writes while vLLM works, in the folder PULSE_FOLDER: progress, steps, stacks."""

from __future__ import annotations

import signal
import struct
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

# --- files of PULSE_FOLDER ------------------------------------------------------------------------

HEALTH = "/health?nibble"  # the supervisor's request; the plugin hides it from the access log
IDLE, STEP, CALL = 0, 1, 2
PulseKind = Literal["api", "engine"]
STACKS_SIGNAL = signal.SIGUSR2  # makes a process write the Python stacks of its threads


def pulse_file(kind: PulseKind, pid: int | Literal["*"]) -> str:
    return f"{kind}-{pid}"


def steps_file(pid: int | Literal["*"]) -> str:
    """The file in which an engine core counts its steps (StepCounts)."""
    return f"steps-{pid}"


def stacks_file(pid: int) -> str:
    return f"stacks-{pid}"


class PulseRecord(NamedTuple):
    """The content of a process's file.

    `turns` grows with each step or answer. `doing` is IDLE, STEP (a step of the model) or CALL (a
    utility). `requests` counts the unfinished requests, `tokens` the tokens of the running batch.
    `paused` is true while the engine sleeps.
    """

    pid: int
    doing: int
    paused: bool
    turns: int
    requests: int
    tokens: int

    def write(self, file: Any) -> None:
        """Write to `file`, a buffer of PULSE_BYTES."""
        _PULSE.pack_into(file, 0, _MAGIC, *self)

    @classmethod
    def from_bytes(cls, data: bytes) -> PulseRecord | None:
        """None for another layout."""
        if len(data) != PULSE_BYTES:
            return None
        magic, pid, doing, paused, *counts = _PULSE.unpack(data)
        return cls(pid, doing, bool(paused), *counts) if magic == _MAGIC else None


_MAGIC = b"nblpuls1"
_PULSE = struct.Struct("=8sIBBxxQQQ")
PULSE_BYTES = _PULSE.size


# --- steps of the model, by the path that they took -----------------------------------------------

StepPath = Literal["graph", "inputs", "vllm"]
# Why a step took its path. `graph`: CUDA graphs prepare the inputs, run the model and sample.
# `inputs`: they prepare the inputs and run the model; vLLM's code samples. `vllm`: vLLM's path.
STEP_REASONS: Mapping[str, StepPath] = {
    "steady": "graph",
    "random_sampler": "inputs",
    "new_sampling": "inputs",
    "grammar": "vllm",
    "thinking_budget": "vllm",
    "unsupported": "vllm",
    "arrival": "vllm",
    "prefill": "vllm",
    "drafts": "vllm",
    "encoder": "vllm",
    "preemption": "vllm",
    "cache_blocks": "vllm",
    "no_graph": "vllm",
    "capture_failed": "vllm",
    "new_batch_size": "vllm",
    "empty": "vllm",
}


class StepCounts:
    """The layout of `steps_file`: one number for each of STEP_REASONS."""

    reasons = tuple(STEP_REASONS)
    _magic = b"nblstep1"
    _struct = struct.Struct(f"=8s{len(reasons)}Q")
    size = _struct.size

    @classmethod
    def write(cls, file: Any, counts: Mapping[str, int]) -> None:
        """Write to `file`, a buffer of `size` bytes."""
        cls._struct.pack_into(file, 0, cls._magic, *(counts.get(name, 0) for name in cls.reasons))

    @classmethod
    def read(cls, data: bytes) -> dict[str, int]:
        """Empty for another layout."""
        if len(data) != cls.size:
            return {}
        magic, *counts = cls._struct.unpack(data)
        return dict(zip(cls.reasons, counts, strict=True)) if magic == cls._magic else {}

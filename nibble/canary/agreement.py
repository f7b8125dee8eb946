"""Checks that the workers of one model run the same kernels and settings. Pure: reports in.

The plan is this machine's alone: a worker that runs another plan on another machine may fit this
one's expectations. A BF16 model does, which has no NVFP4 layer to judge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nibble.canary.kernels import STRICT_ACTION
from nibble.canary.layers import on_node
from nibble.errors import ExitCode, NibbleError

Ran = Mapping[str, Any]
# Part of a report -> how it is called. Of all workers, whichever layers they hold:
OF_ALL: Mapping[str, str] = {
    "architecture": "architecture",
    "quantization": "quantization",
    "max_model_len": "max_model_len",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "model_dtype": "model dtype",
    "device": "device",
    "compilation_mode": "compilation mode",
    "cudagraph_mode": "CUDA graph mode",
    "operators": "nibble's operators",
}
# and of those of one pipeline stage, which hold parts of the same layers.
OF_A_STAGE: Mapping[str, str] = {
    "linear": "linear layers",
    "moe": "experts",
    "attention": "attention",
    "kv_cache_dtype": "KV cache",
    "block_size": "KV cache block size",
    "activations": "activations of NVFP4 layers",
    "sampler": "sampler",
}
ACTION = "serve the same model with the same settings on every rank"


@dataclass(frozen=True)
class Disagreement:
    """A worker that runs something else than the first one of its kind."""

    node: str
    rank: int
    part: str
    found: str
    expected: str

    def line(self) -> str:
        """For /status."""
        return f"{on_node(self.node)}rank {self.rank}: {self.part}: {self.found}, {self.expected}"

    def error(self) -> NibbleError:
        """The end of a start."""
        what = (
            f"{on_node(self.node)}rank {self.rank} differs from the other ranks: {self.part}:"
            f" {self.found}"
        )
        return NibbleError(
            ExitCode.CANARY, what=what, expected=self.expected, action=f"{ACTION}; {STRICT_ACTION}"
        )


def disagreements(reports: Sequence[Ran]) -> tuple[Disagreement, ...]:
    """`reports` are what the workers ran, each with its `node` and `rank`. The first is the one
    that the others are held to, of a pipeline stage its first.
    """
    found: list[Disagreement] = []
    first_of_stage: dict[Any, Ran] = {}
    for ran in reports:
        first = first_of_stage.setdefault(ran.get("stage"), ran)
        found += _differences(ran, reports[0], OF_ALL)
        found += _differences(ran, first, OF_A_STAGE)
    return tuple(found)


def _differences(ran: Ran, first: Ran, parts: Mapping[str, str]) -> Iterator[Disagreement]:
    for part, called in parts.items():
        if ran.get(part) != first.get(part):
            where = f"rank {first['rank']}" + (f" on node {first['node']}" if first["node"] else "")
            expected = f"as {where}: {_told(first.get(part))}"
            yield Disagreement(ran["node"], ran["rank"], called, _told(ran.get(part)), expected)


def _told(value: Any) -> str:
    """{"nvfp4: X": 16} as "nvfp4: X in 16 layers"."""
    if isinstance(value, Mapping):
        counts = [
            f"{name} in {count} layers" if isinstance(count, int) else f"{name} {count}"
            for name, count in value.items()
        ]
        return ", ".join(counts) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)

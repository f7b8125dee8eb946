"""Checks that the workers of one model run the same kernels and settings.

kernels.py compares each worker with this machine's plan. A worker on another machine can follow
another plan and still meet those expectations: a BF16 model has no NVFP4 layer to check. So the
workers are also compared with each other. Pure: reports in, disagreements out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nibble.canary.kernels import STRICT_ACTION
from nibble.canary.layers import on_node
from nibble.errors import ExitCode, NibbleError

Ran = Mapping[str, Any]
# Key of a report -> its name in messages. All workers have the same value of these:
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
# Only workers of the same pipeline stage, which hold the same layers, have the same value of these:
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
    """A worker whose report differs from the first worker's in one part."""

    node: str
    rank: int
    part: str
    found: str
    expected: str

    def line(self) -> str:
        """For /status."""
        return f"{on_node(self.node)}rank {self.rank}: {self.part}: {self.found}, {self.expected}"

    def error(self) -> NibbleError:
        """The error that ends the start."""
        what = (
            f"{on_node(self.node)}rank {self.rank} differs from the other ranks: {self.part}:"
            f" {self.found}"
        )
        return NibbleError(
            ExitCode.CANARY, what=what, expected=self.expected, action=f"{ACTION}; {STRICT_ACTION}"
        )


def disagreements(reports: Sequence[Ran]) -> tuple[Disagreement, ...]:
    """Compare the workers with the first one, and within a pipeline stage with the stage's first.

    reports: each worker's `ran` (contract.report.KernelsUsed), with its `node` and `rank`.
    """
    differing: list[Disagreement] = []
    first_of_stage: dict[Any, Ran] = {}
    for ran in reports:
        first = first_of_stage.setdefault(ran.get("stage"), ran)
        differing += _differences(ran, reports[0], OF_ALL)
        differing += _differences(ran, first, OF_A_STAGE)
    return tuple(differing)


def _differences(ran: Ran, first: Ran, parts: Mapping[str, str]) -> Iterator[Disagreement]:
    for key, part in parts.items():
        if ran.get(key) != first.get(key):
            where = f"rank {first['rank']}" + (f" on node {first['node']}" if first["node"] else "")
            expected = f"as {where}: {_formatted(first.get(key))}"
            yield Disagreement(ran["node"], ran["rank"], part, _formatted(ran.get(key)), expected)


def _formatted(value: Any) -> str:
    """A value of a report in words: {"nvfp4: X": 16} becomes "nvfp4: X in 16 layers"."""
    if isinstance(value, Mapping):
        counts = [
            f"{name} in {count} layers" if isinstance(count, int) else f"{name} {count}"
            for name, count in value.items()
        ]
        return ", ".join(counts) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)

"""The result of a step that a graph sampled."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from nibble.engine.plugin.step_graph.changes import PinnedRing
from nibble.engine.plugin.step_graph.graphs import Sampled


class StepOutput(AsyncModelRunnerOutput):
    """Copies a step's tokens and log-probs to the host; `get_output` waits for them.

    The copies run on the stream of the graphs: the next step overwrites the tensors.
    """

    def __init__(
        self, ids: list[str], indices: dict[str, int], sampled: Sampled, ring: PinnedRing,
        cudagraph_stats: Any,
    ) -> None:  # fmt: skip
        self._ids, self._indices, self._stats = ids, indices, cudagraph_stats
        tokens = sampled.tokens
        host, _ = ring.take()
        self._tokens = host[: tokens.numel()].view(tokens.shape)
        self._tokens.copy_(tokens, non_blocking=True)
        tensors = sampled.output.logprobs_tensors
        self._logprobs = tensors.to_cpu_nonblocking() if tensors is not None else None
        # A blocking event sleeps instead of polling, as vLLM's (async_utils.py:133).
        self._copied = torch.cuda.Event(blocking=True)
        self._copied.record()

    def get_output(self) -> ModelRunnerOutput:
        self._copied.synchronize()
        return ModelRunnerOutput(
            req_ids=self._ids,
            req_id_to_index=self._indices,
            sampled_token_ids=accepted(self._tokens.tolist()),
            logprobs=self._logprobs.tolists() if self._logprobs is not None else None,
            cudagraph_stats=self._stats,
        )


def accepted(rows: list[list[int]]) -> list[list[int]]:
    """Each request's new tokens. A row of more than one number ends with how many there are."""
    return [row[: row[-1]] if len(row) > 1 else row for row in rows]

"""The result of a step that a graph sampled."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from nibble.engine.plugin.step_graph.changes import PinnedRing


class StepOutput(AsyncModelRunnerOutput):
    """Copies a step's tokens and log-probs to the host; `get_output` waits for them.

    The copies run on the stream of the graphs: the next step overwrites the tensors.
    """

    def __init__(
        self, ids: list[str], indices: dict[str, int], sampled: SamplerOutput, ring: PinnedRing,
        cudagraph_stats: Any,
    ) -> None:  # fmt: skip
        self._ids, self._indices, self._stats = ids, indices, cudagraph_stats
        self._tokens, _ = ring.take()
        count = len(ids)
        self._tokens[:count].copy_(sampled.sampled_token_ids.view(-1), non_blocking=True)
        tensors = sampled.logprobs_tensors
        self._logprobs = tensors.to_cpu_nonblocking() if tensors is not None else None
        # A blocking event sleeps instead of polling, as vLLM's (async_utils.py:133).
        self._copied = torch.cuda.Event(blocking=True)
        self._copied.record()

    def get_output(self) -> ModelRunnerOutput:
        self._copied.synchronize()
        tokens = self._tokens[: len(self._ids)].tolist()
        return ModelRunnerOutput(
            req_ids=self._ids,
            req_id_to_index=self._indices,
            sampled_token_ids=[[token] for token in tokens],
            logprobs=self._logprobs.tolists() if self._logprobs is not None else None,
            cudagraph_stats=self._stats,
        )

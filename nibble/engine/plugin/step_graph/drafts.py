"""Drafts in a step from graphs: vLLM's graphs of the drafter, and graphs of what lies between them.

vLLM captures the drafter's model as the model itself (vllm 0.32
v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py:109): one graph drafts the first token,
another one all further tokens. The methods here are the parts of its `propose` around them, for a
batch in which each request has the same number of drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import (
    prepare_decode_inputs,
    prepare_prefill_inputs,
)
from vllm.v1.worker.gpu.spec_decode.utils import get_drafter_hidden_states


@dataclass
class DraftGraphs:
    """The graphs of one number of requests. `first` and `others` describe vLLM's."""

    first: Any
    others: Any | None  # None if only one token is drafted
    between: torch.cuda.CUDAGraph | None = None
    after: torch.cuda.CUDAGraph | None = None


class Drafter:
    """The drafter of vLLM's model runner."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._speculator = runner, runner.speculator
        slots = runner.max_num_reqs
        self._rejected = torch.zeros(slots, dtype=torch.int32, device=runner.device)

    def graphs(self, requests: int, tokens: int) -> DraftGraphs | None:
        """vLLM's graphs for a batch of `tokens`, padded; None if there is none for it."""
        speculator, drafts = self._speculator, self._runner.num_speculative_steps
        manager = speculator.prefill_cudagraph_manager
        first = manager.dispatch(requests, tokens, drafts + 1, num_active_loras=0)
        if not _is_captured(manager, first):
            return None
        if drafts == 1:
            return DraftGraphs(first, None)
        manager = speculator.decode_cudagraph_manager
        others = manager.dispatch(requests, requests, 1, num_active_loras=0)
        others = manager.specialize_spec_tokens(others, drafts)
        return DraftGraphs(first, others) if _is_captured(manager, others) else None

    def tokens(self, requests: int) -> torch.Tensor:
        """What was drafted last. One row for each request."""
        return self._speculator.draft_tokens[:requests]

    def prepare_first(
        self, batch: InputBatch, hidden: torch.Tensor, others: list[torch.Tensor], output: Any
    ) -> None:
        """The inputs of `first`. `others` are hidden states of further layers. To be captured after
        the requests' state has advanced.
        """
        runner, speculator, count = self._runner, self._speculator, batch.num_reqs
        hidden = get_drafter_hidden_states(runner.model, hidden)
        if others:
            hidden = speculator.model.combine_hidden_states(torch.cat(others, dim=-1))
        sampling = runner.sampler.sampling_states
        speculator._copy_request_inputs(
            count, batch.idx_mapping, sampling.temperature.gpu, sampling.seeds.gpu
        )
        self._prepare_prefill(batch, output)
        speculator.hidden_states[: batch.num_tokens_after_padding].copy_(hidden)
        # The graph between reads it at one address, for all samplers.
        self._rejected[:count].copy_(output.num_rejected)

    def _prepare_prefill(self, batch: InputBatch, output: SamplerOutput) -> None:
        speculator, states = self._speculator, self._runner.req_states
        prepare_prefill_inputs(
            speculator.last_token_indices,
            speculator.current_draft_step,
            speculator.input_buffers,
            batch,
            output.num_sampled,
            output.num_rejected,
            states.last_sampled_tokens,
            states.next_prefill_tokens,
            speculator.max_num_reqs,
        )

    def prepare_others(self, batch: InputBatch) -> None:
        """The inputs of `others`. To be captured."""
        speculator, count = self._speculator, batch.num_reqs
        prepare_decode_inputs(
            speculator.draft_tokens[:count, 0],
            batch.seq_lens,
            self._rejected[:count],
            speculator.input_buffers,
            speculator.sample_src_positions,
            speculator.max_model_len,
            speculator.max_num_reqs,
            advance_draft_positions=speculator.advance_draft_positions,
        )
        tables = speculator.block_tables.input_block_tables
        for groups in speculator.attn_groups:
            for group in groups:
                group.map_to_kernel_block_table(tables[group.kv_cache_group_id])

    def keep(self, batch: InputBatch) -> None:
        """Keep the drafts where the next step reads them. To be captured."""
        drafts = self._runner.req_states.draft_tokens
        drafts[batch.idx_mapping] = self.tokens(batch.num_reqs)

    def run(self, graphs: DraftGraphs) -> None:
        """Draft the tokens of the next step."""
        speculator = self._speculator
        assert graphs.after is not None
        speculator.prefill_cudagraph_manager.run_fullgraph(graphs.first)
        if graphs.others is not None:
            assert graphs.between is not None
            graphs.between.replay()
            speculator.decode_cudagraph_manager.run_fullgraph(graphs.others)
        graphs.after.replay()


def _is_captured(manager: Any, desc: Any) -> bool:
    return desc.cg_mode == CUDAGraphMode.FULL and desc in manager.graphs

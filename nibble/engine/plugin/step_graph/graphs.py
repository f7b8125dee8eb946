"""CUDA graphs of what surrounds the model in a decode step: its inputs, sampling, and drafting.

vLLM captures the model alone (vllm 0.32 v1/worker/gpu/cudagraph_utils.py:381). The functions that
are captured here are vLLM's, with the tensors of one batch size at fixed addresses. They launch
what they launch in a step of vLLM, so the results are equal bit for bit.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import vllm.envs as envs
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends import gdn_attn
from vllm.v1.sample.ops import topk_topp_triton
from vllm.v1.worker.gpu.input_batch import (
    InputBatch,
    combine_sampled_and_draft_tokens,
    expand_idx_mapping,
    prepare_pos_seq_lens,
)
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from nibble.engine.plugin.step_graph.changes import BlockChanges, PinnedRing
from nibble.engine.plugin.step_graph.drafts import Drafter, DraftGraphs
from nibble.engine.plugin.step_graph.qualify import Sampling
from nibble.engine.step_graph_memory import action_before_capture, step_graph_bytes

Result = TypeVar("Result")
_USES_BEFORE_CAPTURE = 3


class Sampled(NamedTuple):
    """What a graph sampled. `tokens` has a row for each request: its token, or with drafts the
    tokens up to the first rejected one, others, and last their number.
    """

    tokens: torch.Tensor
    output: SamplerOutput


@dataclass
class CapturedSampler:
    """A graph that samples. `held` keeps buffers that vLLM may replace by larger ones, which the
    graph still reads.
    """

    graph: torch.cuda.CUDAGraph
    sampled: Sampled
    held: list[Any]


@dataclass
class BatchSize:
    """Tensors and graphs for one number of requests."""

    desc: Any  # of the model's graph
    batch: InputBatch
    starts: torch.Tensor  # where each request's tokens start, padded
    is_request: torch.Tensor  # rather than padding
    drafting: DraftGraphs | None
    inputs: torch.cuda.CUDAGraph | None = None
    samplers: dict[Sampling, CapturedSampler] = field(default_factory=dict)
    uses: dict[Sampling, int] = field(default_factory=dict)  # before the capture


class StepGraphs:
    """The graphs of vLLM's model runner (vllm 0.32 v1/worker/gpu/model_runner.py)."""

    def __init__(self, runner: Any, depth: int) -> None:
        self._runner = runner
        slots, self._device = runner.max_num_reqs, runner.device
        self._drafts = runner.num_speculative_steps
        self.drafter = Drafter(runner) if self._drafts else None
        self._slots = torch.zeros(slots, dtype=torch.int64, device=self._device)
        self._ring = PinnedRing(slots, torch.int64, depth)
        self.changes = BlockChanges(runner.block_tables, depth)
        self._stream = torch.cuda.Stream(self._device)
        self._pool, self._sampler_pool = (torch.cuda.graph_pool_handle() for _ in range(2))
        self.limit_bytes = step_graph_bytes(slots, runner.vocab_size, self._drafts)
        self.inputs_bytes = self.samplers_bytes = 0  # taken by the graphs
        self.sizes: dict[int, BatchSize | None] = {}
        self.changes.apply()  # compiles the kernel
        torch.cuda.synchronize()

    def size(self, requests: int) -> BatchSize | None:
        """None if the model has no graph for this number of requests."""
        if requests not in self.sizes:
            self.sizes[requests] = self._found_size(requests)
        return self.sizes[requests]

    def _found_size(self, requests: int) -> BatchSize | None:
        manager, each = self._runner.cudagraph_manager, 1 + self._drafts
        desc = manager.dispatch(requests, requests * each, each, 0, each)
        if desc.uniform_token_count != each or desc not in manager.graphs:
            return None
        drafting = None
        if self.drafter is not None:
            drafting = self.drafter.graphs(requests, desc.num_tokens)
            if drafting is None:
                return None
        return self._new_size(requests, desc, drafting)

    def send_slots(self, size: BatchSize, slots: np.ndarray, ids: list[str]) -> None:
        """Make a batch of the requests `ids` in these slots."""
        tensor, array = self._ring.take()
        array[: len(slots)] = slots
        self._slots[: len(slots)].copy_(tensor[: len(slots)], non_blocking=True)
        size.batch.req_ids, size.batch.idx_mapping_np = ids, slots

    def capture_inputs(self, size: BatchSize) -> bool:
        """Capture the inputs of a batch size, once, and what lies between the drafter's graphs.
        Changes nothing else. False without memory for them.
        """
        if size.inputs is not None:
            return True
        if self.inputs_bytes >= self.limit_bytes:
            return False
        drafter, drafting, batch = self.drafter, size.drafting, size.batch
        if drafter is not None and drafting is not None:
            drafting.after = self._captured_part(lambda: drafter.keep(batch))
            if drafting.others is not None:
                drafting.between = self._captured_part(lambda: drafter.prepare_others(batch))
        size.inputs = self._captured_part(lambda: self._prepare(size))
        return True

    def _captured_part(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph, _, taken = self._captured(work, self._pool)
        self.inputs_bytes += taken
        return graph

    def is_rare(self, size: BatchSize, sampling: Sampling) -> bool:
        """Whether a capture does not pay yet: it takes about as long as four steps."""
        if sampling in size.samplers:
            return False
        size.uses[sampling] = size.uses.get(sampling, 0) + 1
        return size.uses[sampling] <= _USES_BEFORE_CAPTURE

    def capture_sampler(self, size: BatchSize, sampling: Sampling) -> bool:
        """Capture the sampler for the batch that `size` holds. Changes nothing else. False without
        memory for it.
        """
        sizes = [one for one in self.sizes.values() if one is not None]
        count = sum(len(one.samplers) for one in sizes)
        taken = self.inputs_bytes + self.samplers_bytes
        action = action_before_capture(count, taken, self.limit_bytes)
        if action == "stop":
            return False
        if action == "release":
            self._release_samplers(sizes)
        graph, sampled, taken = self._captured(lambda: self._sample(size), self._sampler_pool)
        self.samplers_bytes += taken
        size.samplers[sampling] = CapturedSampler(graph, sampled, _replaceable_buffers())
        return True

    def _release_samplers(self, sizes: list[BatchSize]) -> None:
        torch.cuda.synchronize()
        for one in sizes:
            one.samplers.clear()
        self._sampler_pool, self.samplers_bytes = torch.cuda.graph_pool_handle(), 0
        torch.cuda.empty_cache()

    def run_model(self, size: BatchSize) -> None:
        """Prepare the inputs and run the model."""
        assert size.inputs is not None
        size.inputs.replay()
        self._runner.cudagraph_manager.run_fullgraph(size.desc)

    def hidden_states(self, size: BatchSize) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """What the model computed last: of its last layer, and of others if the drafter reads
        them.
        """
        manager, tokens = self._runner.cudagraph_manager, size.desc.num_tokens
        others = manager.aux_hidden_states if manager.use_aux_hidden_state_outputs else []
        return manager.hidden_states[:tokens], [one[:tokens] for one in others]

    def sample(self, size: BatchSize, sampling: Sampling) -> Sampled:
        """Sample, and advance the requests' state. The tensors are valid until the next step."""
        captured = size.samplers[sampling]
        captured.graph.replay()
        return captured.sampled

    def draft(self, size: BatchSize) -> None:
        """Draft tokens for the next step, after `sample`."""
        assert self.drafter is not None and size.drafting is not None
        self.drafter.run(size.drafting)

    def _new_size(self, requests: int, desc: Any, drafting: DraftGraphs | None) -> BatchSize:
        runner, device, drafts = self._runner, self._device, self._drafts
        buffers, padded, each = runner.input_buffers, desc.num_reqs, 1 + drafts
        tokens = requests * each
        starts = each * np.minimum(np.arange(runner.max_num_reqs + 1, dtype=np.int32), requests)
        slots = self._slots[:requests]
        batch = InputBatch(
            req_ids=[],
            num_reqs=requests,
            num_reqs_after_padding=padded,
            idx_mapping=slots,
            idx_mapping_np=np.zeros(requests, dtype=np.intp),
            expanded_idx_mapping=slots,
            expanded_local_pos=torch.zeros(requests, dtype=torch.int32, device=device),
            num_scheduled_tokens=np.full(requests, each, dtype=np.int32),
            num_tokens=tokens,
            num_tokens_after_padding=desc.num_tokens,
            num_draft_tokens=requests * drafts,
            num_draft_tokens_per_req=np.full(requests, drafts, dtype=np.int32) if drafts else None,
            query_start_loc=buffers.query_start_loc[: padded + 1],
            query_start_loc_np=starts[: padded + 1],
            seq_lens=buffers.seq_lens[:padded],
            # Only its maximum counts, where a backend plans for the longest request.
            seq_lens_cpu_upper_bound=torch.full((padded,), runner.max_model_len, dtype=torch.int32),
            dcp_local_seq_lens=None,
            num_computed_tokens_np=np.zeros(requests, dtype=np.int32),
            prefill_len_np=np.zeros(requests, dtype=np.int32),
            num_computed_prefill_tokens_np=np.zeros(requests, dtype=np.int32),
            is_prefilling_np=np.zeros(requests, dtype=np.bool_),
            has_prefill=False,
            decode_graph_eligible=True,
            input_ids=buffers.input_ids[: desc.num_tokens],
            positions=buffers.positions[: desc.num_tokens],
            is_padding=buffers.is_padding[: desc.num_tokens],
            logits_indices=torch.arange(tokens, dtype=torch.int64, device=device),
            cu_num_logits=torch.from_numpy(starts[: requests + 1]).to(device),
            cu_num_logits_np=starts[: requests + 1],
            has_structured_output_reqs=False,
            prompt_lens=None,
        )
        is_request = torch.arange(padded) < requests
        return BatchSize(
            desc, batch, torch.from_numpy(starts).to(device), is_request.to(device), drafting
        )

    def _prepare(self, size: BatchSize) -> None:
        """GPUModelRunner.prepare_inputs and the rest up to the model, for the same number of tokens
        a request.
        """
        runner, batch = self._runner, size.batch
        buffers, states = runner.input_buffers, runner.req_states
        self.changes.apply()
        if envs.VLLM_MOE_SKIP_PADDING:
            batch.is_padding[: batch.num_tokens].fill_(False)
            batch.is_padding[batch.num_tokens :].fill_(True)
        buffers.query_start_loc.copy_(size.starts)
        if self._drafts:
            batch.expanded_idx_mapping, batch.expanded_local_pos = expand_idx_mapping(
                batch.idx_mapping, batch.num_tokens, batch.cu_num_logits, runner.decode_query_len
            )
        prepare_pos_seq_lens(
            batch.idx_mapping,
            batch.query_start_loc,
            states.num_computed_tokens.gpu,
            buffers.positions,
            buffers.seq_lens,
        )
        batch.logits_indices = combine_sampled_and_draft_tokens(
            buffers.input_ids,
            batch.idx_mapping,
            states.last_sampled_tokens,
            batch.query_start_loc,
            batch.seq_lens,
            states.prefill_len.gpu,
            states.draft_tokens,
            batch.cu_num_logits,
            batch.num_tokens,
            runner.model_state.num_new_sampled_tokens_per_step,
        )
        block_tables, slot_mappings = runner.prepare_attn(batch)
        runner.model_state.preprocess_state(
            batch, block_tables, runner.kv_cache_config, states.num_computed_tokens.gpu
        )
        with _requests_on_device(size):
            runner.model_state.prepare_attn(
                batch,
                CUDAGraphMode.FULL,
                block_tables,
                slot_mappings,
                runner.attn_groups,
                runner.kv_cache_config,
            )
        runner.model_state.prepare_inputs(batch, states)

    def _sample(self, size: BatchSize) -> Sampled:
        """GPUModelRunner.sample_tokens, without what the host reads, up to the drafter's graphs."""
        runner, batch = self._runner, size.batch
        hidden, others = self.hidden_states(size)
        output, num_sampled, num_rejected = runner.sample(hidden, batch, None)
        runner.postprocess_sampled(
            batch.idx_mapping,
            output.sampled_token_ids,
            num_sampled,
            num_rejected,
            batch.query_start_loc,
        )
        if self.drafter is None:
            return Sampled(output.sampled_token_ids, output)
        self.drafter.prepare_first(batch, hidden, others, output)
        count = num_sampled.to(torch.int64).unsqueeze(1)
        return Sampled(torch.cat((output.sampled_token_ids, count), dim=1), output)

    def _captured(
        self, work: Callable[[], Result], pool: Any
    ) -> tuple[torch.cuda.CUDAGraph, Result, int]:
        """A graph of `work`, and the bytes that it took. Other threads may use the GPU."""
        graph, main = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        torch.cuda.synchronize()
        free_before, _ = torch.cuda.mem_get_info(self._device)
        was_enabled = gc.isenabled()
        gc.disable()  # a collection could free tensors of the device, which a capture forbids
        try:
            with torch.cuda.stream(self._stream):
                self._stream.wait_stream(main)
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    result = work()
                finally:
                    graph.capture_end()
            main.wait_stream(self._stream)
        finally:
            if was_enabled:
                gc.enable()
        free_after, _ = torch.cuda.mem_get_info(self._device)
        return graph, result, max(0, free_before - free_after)


@contextlib.contextmanager
def _requests_on_device(size: BatchSize) -> Iterator[None]:
    """Let the builder of gated DeltaNet find on the device which rows have drafts. It copies that
    from the host's memory (vllm 0.32 v1/attention/backends/gdn_attn.py:307), which a graph would
    read again after it is freed.
    """
    backend: Any = gdn_attn
    batch, copy = size.batch, backend.async_tensor_h2d

    def on_device(data: torch.Tensor, device: Any) -> torch.Tensor:
        if not torch.equal(data, torch.arange(batch.num_reqs_after_padding) < batch.num_reqs):
            raise ValueError("vLLM copies something else than which rows have drafts")
        return size.is_request

    backend.async_tensor_h2d = on_device
    try:
        yield
    finally:
        backend.async_tensor_h2d = copy


def _replaceable_buffers() -> list[Any]:
    """Buffers of vLLM's top-k and top-p kernels (vllm 0.32 topk_topp_triton.py:31)."""
    caches = (
        topk_topp_triton._TRITON_BUFFER_CACHE,
        topk_topp_triton._TRITON_TABLE_CACHE,
        topk_topp_triton._TRITON_SPLIT_CACHE,
    )
    return [
        dict(value) if isinstance(value, dict) else value
        for cache in caches
        for value in cache.values()
    ]

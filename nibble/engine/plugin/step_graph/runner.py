"""vLLM's V2 model runner with steps that run from CUDA graphs as a whole.

A step that does not qualify takes vLLM's path. All state of requests stays where vLLM keeps it, so
either path continues what the other left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu.cudagraph_utils import make_cudagraph_stats
from vllm.v1.worker.gpu.model_runner import ExecuteModelState, GPUModelRunner

from nibble.engine.contract import Options
from nibble.engine.contract.pulse import STEP_REASONS
from nibble.engine.plugin.step_graph.changes import NewBlocks, PinnedRing
from nibble.engine.plugin.step_graph.counts import Counter, pulse_folder
from nibble.engine.plugin.step_graph.facts import engine_facts, sampler_tables
from nibble.engine.plugin.step_graph.graphs import BatchSize, StepGraphs
from nibble.engine.plugin.step_graph.output import StepOutput
from nibble.engine.plugin.step_graph.prompts import (
    is_for_prompts,
    plan_long_prompts,
    refusal_of_prompts,
    take_full_graphs,
)
from nibble.engine.plugin.step_graph.qualify import (
    STEADY,
    Sampling,
    is_prefilling,
    refusal_of_engine,
    refusal_of_schedule,
    sampling_of,
)
from nibble.engine.plugin.step_graph.tables import fix_addresses
from nibble.engine.step_graph_memory import MOST_REQUESTS, step_graph_bytes

logger = init_logger(f"vllm.{__name__}")


@dataclass
class Batch:
    """The requests of the last step, and what follows from them."""

    ids: list[str]
    indices: dict[str, int]
    slots: np.ndarray
    size: BatchSize
    sampling: Sampling
    refusal: str  # of the sampler


class StepGraphRunner(GPUModelRunner):
    """Replaces vLLM's GPUModelRunner."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        options = Options.from_config(vllm_config.additional_config)
        self._is_asked = options.step_graph == "on"
        if self._is_asked:
            fix_addresses()
        super().__init__(vllm_config, device)
        self._graphs: StepGraphs | None = None
        self._batch: Batch | None = None
        self._to_sample: Batch | None = None
        self._has_failed = False
        self._seen: set[int] = set()
        # Each step runs on all ranks; one counts.
        self.step_counter = Counter(pulse_folder() if self.parallel_config.rank == 0 else None)

    def initialize_kv_cache(self, *arguments: Any, **options: Any) -> None:
        self._graphs = self._batch = None
        super().initialize_kv_cache(*arguments, **options)
        if not self._is_asked:
            return
        assert self.cudagraph_manager is not None
        if refusal := refusal_of_prompts(self):
            logger.info_once(
                "Steps with prompts use piecewise CUDA graphs: %s (docs/step_graph.md)", refusal
            )
        else:
            take_full_graphs(self.cudagraph_manager, plan_long_prompts(self))

    def prepare_inputs(
        self, scheduler_output: Any, state: Any, desc: Any, num_active_loras: int
    ) -> Any:
        batch = super().prepare_inputs(scheduler_output, state, desc, num_active_loras)
        if is_for_prompts(desc):
            batch.max_query_len = desc.num_tokens  # as captured, so that attention is planned so
        return batch

    def profile_cudagraph_memory(self) -> int:
        """What vLLM's KV cache leaves free for CUDA graphs, nibble's included."""
        taken = super().profile_cudagraph_memory()
        if not self._is_asked:
            return taken
        return taken + step_graph_bytes(
            self.max_num_reqs, self.vocab_size, self.num_speculative_steps
        )

    def capture_model(self, *, profile_only: bool = False) -> int:
        taken = super().capture_model(profile_only=profile_only)
        if self._is_asked and not profile_only:
            self._begin()
        return taken

    @torch.inference_mode()
    def _begin(self) -> None:
        refusal = refusal_of_engine(engine_facts(self))
        if refusal:
            logger.info("Decode steps take vLLM's path: %s (docs/step_graph.md)", refusal)
            return
        depth = self.vllm_config.max_concurrent_batches + 2
        self._tables = sampler_tables(self.sampler, has_drafts=self.num_speculative_steps > 0)
        drafts = self.num_speculative_steps
        # With drafts: one more token than drafts, and the number of tokens.
        width = drafts + 2 if drafts else 1
        self._ring = PinnedRing(self.max_num_reqs * width, torch.int64, depth)
        self._graphs = StepGraphs(self, depth)
        logger.info("Decode steps run from CUDA graphs where the batch allows it")

    @torch.inference_mode()
    def execute_model(
        self, scheduler_output: Any, intermediate_tensors: Any = None, dummy_run: bool = False,
        **options: Any,
    ) -> Any:  # fmt: skip
        self._to_sample = None
        if self._graphs is None or dummy_run:
            self._batch = None
            return super().execute_model(
                scheduler_output, intermediate_tensors, dummy_run, **options
            )
        reason = self._run_graphs(scheduler_output)
        self.step_counter.add(reason or "steady")
        if STEP_REASONS.get(reason) == "vllm":
            self._batch = None
            return super().execute_model(scheduler_output, intermediate_tensors)
        return None

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: Any) -> Any:
        batch, self._to_sample = self._to_sample, None
        if batch is None or self._graphs is None:
            return super().sample_tokens(grammar_output)
        sampled = self._graphs.sample(batch.size, batch.sampling)
        # Tokens are copied before the drafter runs, so that the host has them earlier.
        output = StepOutput(batch.ids, batch.indices, sampled, self._ring, self._stats(batch))
        if (drafter := self._graphs.drafter) is not None:
            self._graphs.draft(batch.size)
            drafts = drafter.tokens(len(batch.ids))
            self.draft_tokens_handler.set_draft_tokens(batch.size.batch, drafts)
        return output

    def _run_graphs(self, output: Any) -> str:
        """Run the model from graphs if the step allows it. Returns the step's reason; nothing has
        changed if its path is vLLM's.
        """
        graphs = self._graphs
        assert graphs is not None
        if reason := refusal_of_schedule(output, self.num_speculative_steps):
            return reason
        cached = output.scheduled_cached_reqs
        ids = list(output.num_scheduled_tokens)
        if cached.req_ids != ids:
            return "unsupported"
        computed = np.array(cached.num_computed_tokens, dtype=np.int32)
        last = self._batch
        batch = last if last is not None and last.ids == ids else self._new_batch(ids, computed)
        if isinstance(batch, str):
            return batch
        new_blocks: list[tuple[int, NewBlocks]] = []
        if any(cached.new_block_ids):
            pairs = zip(batch.slots.tolist(), cached.new_block_ids, strict=True)
            new_blocks = [(slot, blocks) for slot, blocks in pairs if blocks]
            if not graphs.changes.has_room(new_blocks):
                return "cache_blocks"
        self.finish_requests(output)
        if output.new_block_ids_to_zero:
            assert self.kv_block_zeroer is not None
            self.kv_block_zeroer.zero_block_ids(output.new_block_ids_to_zero)
        self.req_states.num_computed_tokens_np[batch.slots] = computed
        if batch is not last:
            graphs.send_slots(batch.size, batch.slots, ids)
            self._batch = batch
        if new_blocks:
            graphs.changes.send(new_blocks)
        graphs.run_model(batch.size)
        return self._choose_sampler(batch, output, computed)

    def _new_batch(self, ids: list[str], computed: np.ndarray) -> Batch | str:
        """A batch of these requests, or the reason against it."""
        graphs = self._graphs
        assert graphs is not None
        if len(ids) > MOST_REQUESTS or (size := graphs.size(len(ids))) is None:
            return "no_graph"
        indices = self.req_states.req_id_to_index
        slots = np.fromiter((indices[one] for one in ids), dtype=np.intp, count=len(ids))
        if is_prefilling(computed, self.req_states.prefill_len.np[slots]):
            return "prefill"
        assert self.sampler is not None
        # With drafts, vLLM ignores token ids whose log-probs are asked for.
        has_drafts = self.num_speculative_steps > 0
        logprobs = self.sampler.get_logprobs_dims(slots, include_token_ids=not has_drafts)
        sampling, refusal = sampling_of(self._tables, slots, logprobs)
        if STEP_REASONS.get(refusal) == "vllm":
            return refusal
        if len(ids) not in self._seen:  # vLLM's step compiles and warms what the capture records
            self._seen.add(len(ids))
            return "new_batch_size"
        if not self._is_captured("inputs", lambda: graphs.capture_inputs(size)):
            return "capture_failed" if self._has_failed else "no_graph"
        return Batch(ids, {one: i for i, one in enumerate(ids)}, slots, size, sampling, refusal)

    def _is_captured(self, what: str, capture: Callable[[], bool]) -> bool:
        """Whether a capture succeeds. After a failure, steps take vLLM's path for good."""
        if self._has_failed:
            return False
        try:
            return capture()
        except Exception:
            self._has_failed = True
            logger.warning(
                "Decode steps take vLLM's path: the capture of a step's %s failed. Set"
                " NIBBLE_STEP_GRAPH=off to avoid the attempt.", what, exc_info=True,
            )  # fmt: skip
        return False

    def _choose_sampler(self, batch: Batch, output: Any, computed: np.ndarray) -> str:
        """Have `sample_tokens` sample from a graph, or by vLLM's code. Returns the reason."""
        graphs, size = self._graphs, batch.size
        assert graphs is not None
        reason = batch.refusal
        if not reason and graphs.is_rare(size, batch.sampling):
            reason = "new_sampling"
        elif not reason and batch.sampling not in size.samplers:
            capture = functools.partial(graphs.capture_sampler, size, batch.sampling)
            reason = STEADY if self._is_captured("sampler", capture) else "new_sampling"
        if not reason:
            self._to_sample = batch
            return STEADY
        self._leave_sampling(batch, output, computed)
        return reason

    def _leave_sampling(self, batch: Batch, output: Any, computed: np.ndarray) -> None:
        """Let vLLM's `sample_tokens` continue. Its drafter runs from graphs too, so it needs no
        metadata for attention.
        """
        assert self._graphs is not None
        hidden_states, others = self._graphs.hidden_states(batch.size)
        of_step, prefill_len = batch.size.batch, self.req_states.prefill_len.np[batch.slots]
        of_step.num_computed_tokens_np, of_step.prefill_len_np = computed, prefill_len
        of_step.num_computed_prefill_tokens_np = np.minimum(computed, prefill_len)
        self.execute_model_state = ExecuteModelState(
            input_batch=of_step,
            attn_metadata=None,
            slot_mappings_by_layer=None,
            hidden_states=hidden_states,
            aux_hidden_states=others or None,
            dp_sync_state=None,
            finished_req_ids=output.finished_req_ids,
            ec_connector_output=None,
            cudagraph_stats=self._stats(batch),
            num_spec_tokens_to_schedule=self.num_speculative_steps,
        )

    def _stats(self, batch: Batch) -> Any:
        if not self.observability_config.cudagraph_metrics:
            return None
        return make_cudagraph_stats(batch.size.desc, batch.size.batch.num_tokens)

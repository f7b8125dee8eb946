"""Decides whether a step of the model may run from CUDA graphs. Pure functions.

The first that applies of contract.pulse.STEP_REASONS is a step's reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

STEADY = ""


def refusal_of_schedule(output: Any, drafts: int = 0) -> str:
    """Why the batch of a SchedulerOutput (vllm 0.32 v1/core/sched/output.py:232) is not a steady
    decode step; STEADY if it is one. One new token and `drafts` drafted ones for each request, and
    nothing beside them.
    """
    cached = output.scheduled_cached_reqs
    if not output.total_num_scheduled_tokens:
        return "empty"
    if output.scheduled_new_reqs:
        return "arrival"
    if output.preempted_req_ids or cached.resumed_req_ids:
        return "preemption"
    if output.scheduled_encoder_inputs or output.free_encoder_mm_hashes:
        return "encoder"
    if output.kv_cache_block_copies:
        return "cache_blocks"
    if output.has_structured_output_requests:
        return "grammar"
    drafted, requests = output.scheduled_spec_decode_tokens, len(output.num_scheduled_tokens)
    if output.num_spec_tokens_to_schedule != drafts:
        return "drafts"
    if any(len(found) != drafts for found in drafted.values()):
        return "drafts"
    if output.total_num_scheduled_tokens > (1 + drafts) * requests:
        return "prefill"
    if drafts and len(drafted) < requests:
        return "drafts"
    return STEADY


def is_prefilling(computed: np.ndarray, prefill_len: np.ndarray) -> bool:
    """Whether a request still computes its prompt, from computed and prompt tokens."""
    return bool((computed < prefill_len).any())


class Sampling(NamedTuple):
    """What decides which kernels vLLM's sampler launches for a batch (vllm 0.32
    v1/worker/gpu/sample/sampler.py:184). Two batches of one size and equal Sampling launch the same
    kernels; everything else that they read is on the device.
    """

    is_processed: bool = False
    has_bias: bool = False
    restores_stop_tokens: bool = False
    has_penalties: bool = False
    bad_words: int = 0
    has_temperature: bool = False
    has_min_p: bool = False
    has_top_k: bool = False
    has_top_p: bool = False
    logprobs: tuple[int, int] | None = None


@dataclass(frozen=True)
class SamplerTables:
    """The sampler's values of all request slots, on the host."""

    needs_processing: np.ndarray
    use_bias: np.ndarray
    restores: np.ndarray
    use_penalty: np.ndarray
    bad_words: np.ndarray
    temperature: np.ndarray
    min_p: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    seeds_set: np.ndarray
    vocabulary: int
    thinking: np.ndarray | None
    has_fused_sampler: bool
    processed_logprobs: bool


def sampling_of(
    tables: SamplerTables, rows: np.ndarray, logprobs: tuple[int, int] | None
) -> tuple[Sampling, str]:
    """What the sampler does for the requests in the slots `rows`, and why it cannot be captured
    (STEADY if it can).

    FlashInfer's sampler reads the random generator's state on the host: a graph would repeat its
    draws. vLLM uses it for a batch without seeds and greedy requests (sampler.py:328).
    """
    temperature = tables.temperature[rows]
    has_top_k = bool((tables.top_k[rows] != tables.vocabulary).any())
    has_top_p = bool((tables.top_p[rows] != 1.0).any())
    is_processed = bool(tables.needs_processing[rows].any())
    found = Sampling(has_top_k=has_top_k, has_top_p=has_top_p, logprobs=logprobs)
    if is_processed:
        found = Sampling(
            is_processed=True,
            has_bias=bool(tables.use_bias[rows].any()),
            restores_stop_tokens=bool(tables.restores[rows].any()),
            has_penalties=bool(tables.use_penalty[rows].any()),
            bad_words=int(tables.bad_words[rows].max()),
            has_temperature=bool(((temperature != 0.0) & (temperature != 1.0)).any()),
            has_min_p=bool(tables.min_p[rows].any()),
            has_top_k=has_top_k,
            has_top_p=has_top_p,
            logprobs=logprobs,
        )
        if tables.thinking is not None and tables.thinking[rows].any():
            return found, "thinking_budget"
    is_fused = (
        tables.has_fused_sampler
        and (has_top_k or has_top_p)
        and not (logprobs is not None and tables.processed_logprobs)
        and not (temperature == 0.0).any()
        and not tables.seeds_set[rows].any()
    )
    return found, "random_sampler" if is_fused else STEADY


def refusal_of_engine(facts: Mapping[str, bool]) -> str:
    """The first fact of an engine that rules graphs of whole steps out; STEADY if none does."""
    return next((name for name, is_so in facts.items() if is_so), STEADY)

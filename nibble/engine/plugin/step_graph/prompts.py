"""Full CUDA graphs of the model for steps with prompts of up to 2048 tokens.

vLLM captures decode steps in full graphs, and steps with prompts in piecewise ones, between which
Python launches each layer's attention. With short prompts that takes longer than the GPU needs.
FlashAttention 3 can be captured with prompts, too (vllm 0.32
v1/attention/backends/flash_attn.py:596). vLLM's mode FULL does so, but has no graphs for decode
steps alone. Here a model has both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm import envs
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionMetadataBuilder,
    _get_sliding_window_configs,
)
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from nibble.engine.plugin.attention.backend import CutePagedMetadataBuilder
from nibble.engine.plugin.step_graph.facts import model_facts
from nibble.engine.plugin.step_graph.qualify import refusal_of_engine
from nibble.engine.step_graph_memory import LONG_PROMPT_SIZES, PROMPT_SIZES


def is_for_prompts(desc: BatchExecutionDescriptor) -> bool:
    """Whether a full graph takes requests of any lengths."""
    is_full = desc.cg_mode == CUDAGraphMode.FULL
    return is_full and desc.uniform_token_count is None and desc.max_query_len is None


def take_full_graphs(manager: ModelCudaGraphManager, long_sizes: Sequence[int] = ()) -> None:
    """Have a manager that has captured nothing yet capture full graphs for prompts, in place of the
    piecewise ones of the same sizes, and those of `long_sizes` tokens beyond.
    """
    piecewise = manager._capture_descs.pop(CUDAGraphMode.PIECEWISE)
    of_piecewise = {
        one: BatchExecutionDescriptor(
            CUDAGraphMode.FULL, one.num_tokens, min(one.num_tokens, manager.max_num_reqs)
        )
        for one in piecewise
    }
    for candidates in manager._candidates.values():
        candidates[:] = [of_piecewise.get(one, one) for one in candidates]
    # FlashAttention plans more than 992 requests in another way; those are decode steps anyway.
    most = max(one.num_tokens for one in piecewise)
    requests = min(most, manager.max_num_reqs)
    long = [BatchExecutionDescriptor(CUDAGraphMode.FULL, size, requests) for size in long_sizes]
    least = most + 1
    for desc in long:
        for tokens in range(least, desc.num_tokens + 1):
            manager._candidates[tokens, 0] = [desc]
        least = desc.num_tokens + 1
    full = manager._capture_descs.setdefault(CUDAGraphMode.FULL, [])
    full.extend((*of_piecewise.values(), *long))
    full.sort(key=lambda one: one.num_tokens, reverse=True)


def plan_long_prompts(runner: Any) -> list[int]:
    """The sizes of graphs beyond vLLM's, for which nibble's attention then plans batches. None with
    vLLM's attention, or if vLLM's sizes were chosen.
    """
    builders = _builders(runner)
    if runner.compilation_config.max_cudagraph_capture_size != PROMPT_SIZES[-1]:
        return []
    if not all(isinstance(one, CutePagedMetadataBuilder) for one in builders):
        return []
    sizes = [size for size in LONG_PROMPT_SIZES if size <= runner.max_num_tokens]
    for one in builders:
        one.longest_graph = max(sizes, default=0)
    return sizes


def refusal_of_prompts(runner: Any) -> str:
    """Why an engine has no full graphs for prompts; empty if it has."""
    return refusal_of_engine(_facts(runner))


def _facts(runner: Any) -> dict[str, bool]:
    config = runner.vllm_config
    mode = runner.cudagraph_manager.cudagraph_mode
    builders = _builders(runner)
    return model_facts(runner) | {
        "another CUDA graph mode": mode != CUDAGraphMode.FULL_AND_PIECEWISE,
        "another attention backend": not all(_takes_prompts(one) for one in builders),
        # The next two were not tested.
        "another cache than BF16": any(_cache_type(one) != torch.bfloat16 for one in builders),
        "drafts": runner.num_speculative_steps > 0,
        "sliding windows": not _get_sliding_window_configs(config) <= {None, (-1, -1)},
        "a model with other state": type(runner.model_state) is not DefaultModelState,
        "a KV connector": config.kv_transfer_config is not None,
        "results that do not depend on the batch": envs.VLLM_BATCH_INVARIANT,
    }


def _builders(runner: Any) -> list[Any]:
    return [one.get_metadata_builder(0) for group in runner.attn_groups for one in group]


def _takes_prompts(builder: Any) -> bool:
    """FlashAttention 3, which can be captured with prompts; or nibble's backend on it."""
    if type(builder) not in (CutePagedMetadataBuilder, FlashAttentionMetadataBuilder):
        return False
    return FlashAttentionMetadataBuilder._cudagraph_support is AttentionCGSupport.ALWAYS


def _cache_type(builder: Any) -> torch.dtype | None:
    """None for a backend that has no such attribute."""
    return getattr(builder, "kv_cache_dtype", None)

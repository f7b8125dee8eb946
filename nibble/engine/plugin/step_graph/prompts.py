"""CUDA graphs of the whole model for steps with prompts of a few hundred tokens.

vLLM captures decode steps as a whole. Steps with prompts it captures in pieces, between which
Python launches each layer's attention: for up to some 512 tokens that takes longer than the GPU
needs. FlashAttention 3 can be captured with prompts, too (vllm 0.32
v1/attention/backends/flash_attn.py:596). vLLM's mode FULL does so, and gives up graphs that are for
decode steps alone. Here a model has both: the graphs of mode FULL come before those in pieces.
"""

from __future__ import annotations

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


def is_for_prompts(desc: BatchExecutionDescriptor) -> bool:
    """Whether a graph of the whole model takes requests of any lengths."""
    is_whole = desc.cg_mode == CUDAGraphMode.FULL
    return is_whole and desc.uniform_token_count is None and desc.max_query_len is None


def add_prompt_graphs(manager: ModelCudaGraphManager) -> None:
    """Have a manager that has captured nothing yet capture and find graphs for prompts."""
    most = manager.max_num_reqs
    pieces = manager._capture_descs[CUDAGraphMode.PIECEWISE]
    whole = [
        BatchExecutionDescriptor(CUDAGraphMode.FULL, one.num_tokens, min(one.num_tokens, most))
        for one in pieces
    ]
    full = manager._capture_descs.setdefault(CUDAGraphMode.FULL, [])
    full.extend(whole)
    full.sort(key=lambda one: one.num_tokens, reverse=True)
    of_tokens = dict(zip(pieces, whole, strict=True))
    for candidates in manager._candidates.values():
        for i, one in enumerate(candidates):
            if one in of_tokens:
                candidates.insert(i, of_tokens[one])
                break


def refusal_of_prompts(runner: Any) -> str:
    """Why an engine has no graphs for prompts; empty if it has."""
    builders = [one.get_metadata_builder(0) for group in runner.attn_groups for one in group]
    if not all(_takes_prompts(one) for one in builders):
        return "another attention backend"
    if any(one.kv_cache_dtype != torch.bfloat16 for one in builders):
        return "another cache than BF16"  # not tested
    return next((name for name, is_so in _facts(runner).items() if is_so), "")


def _facts(runner: Any) -> dict[str, bool]:
    config, parallel = runner.vllm_config, runner.parallel_config
    mode = runner.cudagraph_manager.cudagraph_mode
    return {
        "another CUDA graph mode": mode != CUDAGraphMode.FULL_AND_PIECEWISE,
        "drafts": runner.num_speculative_steps > 0,  # not tested
        "sliding windows": not _get_sliding_window_configs(config) <= {None, (-1, -1)},
        "pipeline or data parallelism": parallel.world_size_across_dp
        > parallel.tensor_parallel_size,
        "context parallelism": runner.use_dcp or runner.pcp_manager is not None,
        "balanced experts": parallel.enable_eplb,
        "adapters": runner.lora_config is not None,
        "inputs as embeddings": runner.uses_inputs_embeds,
        "a pooling model": runner.is_pooling_model,
        "a model with other state": type(runner.model_state) is not DefaultModelState,
        "a KV connector": config.kv_transfer_config is not None,
        "auxiliary outputs": runner.aux_output_connector is not None,
        "microbatches": runner.ubatch_runner is not None,
        "fast prefill": config.cache_config.kv_sharing_fast_prefill,
        "reference windows": runner.model_config.rswa_window is not None,
        "results that do not depend on the batch": envs.VLLM_BATCH_INVARIANT,
    }


def _takes_prompts(builder: Any) -> bool:
    """FlashAttention 3, which can be captured with prompts; or nibble's backend on it."""
    if type(builder) not in (CutePagedMetadataBuilder, FlashAttentionMetadataBuilder):
        return False
    return FlashAttentionMetadataBuilder._cudagraph_support is AttentionCGSupport.ALWAYS

"""Reads from vLLM's objects what decides whether steps may run from graphs."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder
from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from nibble.engine.plugin.attention.backend import CutePagedMetadataBuilder
from nibble.engine.plugin.step_graph.qualify import SamplerTables

# logit bias, penalties, bad words (vllm 0.32 sample/sampler.py:79); a custom one reads the host
_PROCESSORS = 3


def model_facts(runner: Any) -> dict[str, bool]:
    """What rules full CUDA graphs of a model out, in any step: name -> whether it is so."""
    parallel = runner.parallel_config
    return {
        "pipeline or data parallelism": parallel.world_size_across_dp
        > parallel.tensor_parallel_size,
        "context parallelism": runner.use_dcp or runner.pcp_manager is not None,
        "balanced experts": parallel.enable_eplb,
        "adapters": runner.lora_config is not None,
        "inputs as embeddings": runner.uses_inputs_embeds,
        "a pooling model": runner.is_pooling_model,
        "auxiliary outputs": runner.aux_output_connector is not None,
        "microbatches": runner.ubatch_runner is not None,
        "fast prefill": runner.fast_prefill is not None,
        "reference windows": runner.model_config.rswa_window is not None,
    }


def engine_facts(runner: Any) -> dict[str, bool]:
    """What rules graphs of whole steps out for an engine: name -> whether it is so."""
    sampler = runner.sampler
    return model_facts(runner) | {
        "sampling divided over GPUs": runner.batch_sharder is not None,
        "another kind of speculative decoding": not _drafts_as_expected(runner),
        "a model with other state": not _has_state_on_device(runner.model_state),
        "a KV connector": runner.kv_connector is not NO_OP_KV_CONNECTOR,
        "an encoder connector": runner.vllm_config.ec_transfer_config is not None,
        "another sampler": type(sampler) is not Sampler
        or len(getattr(sampler, "logits_processors", ())) != _PROCESSORS
        or sampler.trace_replay_state is not None
        or sampler.return_sampling_mask
        or sampler.compute_nans
        or sampler.use_xpu_sampler,
        "no CUDA graph of the model": not runner.cudagraph_manager.graphs,
        "another attention backend": not _are_planned_on_device(runner.attn_groups),
    }


def _drafts_as_expected(runner: Any) -> bool:
    """Whether the engine drafts nothing, or drafts.py knows how it drafts, and the drafter's graphs
    prepare each of its tokens after the first on the device.
    """
    speculator, drafts, rejection = (
        runner.speculator, runner.num_speculative_steps, runner.rejection_sampler,
    )  # fmt: skip
    if speculator is None or not drafts:
        return speculator is None and not drafts
    if type(speculator) not in (EagleSpeculator, MTPSpeculator):
        return False
    return (
        runner.decode_query_len == drafts + 1
        and not runner.speculative_config.uses_dynamic_speculative_decoding()
        and runner.adaptive_verification is None
        and type(rejection) is RejectionSampler
        and rejection.watermark_key is None
        and speculator.acceptance_estimator is None
        and speculator.draft_watermarker is None
        and not getattr(speculator, "share_mtp_topk_indices", False)
        and (drafts == 1 or speculator.supports_decode_metadata_update)
        and _are_planned_on_device(speculator.attn_groups)
    )


def _are_planned_on_device(groups: Any) -> bool:
    return all(
        _is_planned_on_device(one.get_metadata_builder(0)) for group in groups for one in group
    )


def _has_state_on_device(state: Any) -> bool:
    """Whether kernels alone advance a request's state from one token to the next."""
    if type(state) is MambaHybridModelState:
        return state.recoverssm is None
    return type(state) is DefaultModelState


def _is_planned_on_device(builder: Any) -> bool:
    """Whether a backend plans its work on the device alone.

    FlashAttention 3 compares a sliding window with the longest request, which only the host knows.
    """
    if type(builder) is TritonAttentionMetadataBuilder:
        return True
    if type(builder) is GDNAttentionMetadataBuilder:
        return builder.use_full_cuda_graph
    if type(builder) is CutePagedMetadataBuilder:
        if not builder.plans_on_host:
            return True
    elif type(builder) is not FlashAttentionMetadataBuilder:
        return False
    return not builder.aot_schedule or builder.aot_sliding_window in (None, (-1, -1))


def sampler_tables(sampler: Any, *, has_drafts: bool) -> SamplerTables:
    """The sampler's host tables. They are written in place (vllm 0.32 sample/states.py:45).

    FlashInfer's sampler does not verify drafts.
    """
    states, thinking = sampler.sampling_states, sampler.thinking_budget_state
    bias, penalties, bad_words = sampler.logits_processors
    return SamplerTables(
        needs_processing=sampler.needs_logits_processing,
        use_bias=bias.use_logit_bias,
        restores=bias.restore_when_all_masked.np,
        use_penalty=penalties.use_penalty,
        bad_words=bad_words.num_bad_words.np,
        temperature=states.temperature.np,
        min_p=states.min_p.np,
        top_k=states.top_k.np,
        top_p=states.top_p.np,
        seeds_set=states.seeds_set,
        vocabulary=states.vocab_size,
        thinking=thinking.use_thinking_budget if thinking.enabled else None,
        has_fused_sampler=sampler.use_flashinfer and not has_drafts,
        processed_logprobs=sampler.logprobs_mode.startswith("processed"),
    )

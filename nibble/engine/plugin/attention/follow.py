"""Registers CUTE_PAGED in vLLM's workers, in FlashAttention's place."""

from __future__ import annotations

import functools
from typing import Any

from vllm.platforms import current_platform

from nibble.engine.contract import ATTENTION, Options
from nibble.engine.plugin.require import replace, required, required_of_instances

BACKEND = "nibble.engine.plugin.attention.backend.CutePagedBackend"
# What the backend takes and reads of FlashAttention's.
SCHEDULE = (
    *("aot_schedule", "batch_size", "cu_query_lens", "max_query_len", "seqlens", "max_seq_len"),
    *("causal", "max_num_splits"),
)
REST = ("attn_metadata", "output")
ATTRIBUTES = (
    *("num_heads", "num_kv_heads", "head_size", "scale", "kv_cache_dtype", "sliding_window"),
    *("logits_soft_cap", "alibi_slopes", "sinks", "attn_type", "supports_quant_query_input"),
)


def offer_attention() -> None:
    """Register the backend in each GPU worker that is created from now on with the option
    attention_kernel. Raises VllmMismatch.

    In the worker alone: --attention-backend does not take the name, because a name that a plugin
    registers cannot be sent to a process that has not loaded its plugins yet.
    """
    if not current_platform.is_cuda():
        return
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    create = required(WorkerWrapperBase, "init_device", "self")

    @functools.wraps(create)
    def create_with_backend(wrapper: Any) -> None:
        options = Options.from_config(wrapper.vllm_config.additional_config)
        if options.attention_kernel != "vllm":
            require_kernel()
            register()
        create(wrapper)

    replace(WorkerWrapperBase, "init_device", create_with_backend)


def require_kernel() -> None:
    """Raise ValueError if nibble's kernel cannot run on this GPU."""
    from nibble.engine.plugin.cuda import runs_here

    supported, reason = runs_here()
    if not supported:
        raise ValueError(f"nibble's decode attention cannot run: {reason}")


@functools.cache
def register() -> None:
    """Make vLLM's choice of FlashAttention mean CUTE_PAGED. Raises VllmMismatch."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends import flash_attn, registry

    names = required(registry, "AttentionBackendEnum")
    register_backend = required(registry, "register_backend", "backend", "class_path")
    builder = required(flash_attn, "FlashAttentionMetadataBuilder")
    required(builder, "build", "self", "common_prefix_len", "common_attn_metadata")
    required(builder, "_get_scheduler_metadata", "self", *SCHEDULE)
    required(builder, "_cudagraph_support")
    impl = required(flash_attn, "FlashAttentionImpl")
    required(impl, "forward", "self", "layer", "query", "key", "value", "kv_cache", *REST)
    required(impl, "process_weights_after_loading", "self", "act_dtype")
    required_of_instances(impl, *ATTRIBUTES)
    if ATTENTION not in names.__members__:  # vLLM looks a layer's backend up by its name
        register_backend(ATTENTION, BACKEND)
    register_backend(names.FLASH_ATTN, BACKEND)
    required(selector, "_cached_get_attn_backend").cache_clear()

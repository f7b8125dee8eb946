"""The attention backend CUTE_PAGED: FlashAttention's, with nibble's kernel for decode steps.

A batch is nibble's if none of its requests has more query tokens than a decode step, and with the
option `few` if there are few of them, padded ones of a CUDA graph included. All others, and layers
that the kernel does not know, take FlashAttention's path. With an FP8 cache nibble's kernel takes
queries in BF16, so they are rounded to FP8 on FlashAttention's path alone.

nibble's kernel reads lengths, block tables and older tokens while the kernel before it runs. That
one writes queries, keys and values (attention_front, or vLLM's rotation and cache write). What
prepares a step and copies blocks ends before the embedding begins: those kernels let nothing begin
before they end. A KV connector may load tokens until just before a layer, so it rules that out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from nibble_kernels.decode_attention import decode_attention
from torch import Tensor
from vllm import envs
from vllm._custom_ops import scaled_fp8_quant
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from nibble.engine.contract import ATTENTION, Options
from nibble.engine.decode_attention import (
    AttentionShape,
    is_decode_batch,
    most_queries,
    most_requests,
    refusal_of_shape,
)
from nibble.engine.plugin.attention.workspace import reserve, workspace_of

logger = init_logger(f"vllm.{__name__}")


@dataclass
class CutePagedMetadata(FlashAttentionMetadata):
    """`decodes`: nibble's kernel computes this batch. `early`: it may read before its turn."""

    decodes: bool = False
    early: bool = False


def decodes(metadata: object) -> TypeGuard[CutePagedMetadata]:
    """Whether nibble's kernel computes a batch."""
    return isinstance(metadata, CutePagedMetadata) and metadata.decodes


def packed(query: Tensor) -> Tensor:
    """Where attention_front writes queries in FP8 in a buffer for BF16."""
    return query.view(torch.float8_e4m3fn).view(-1)[: query.numel()].view(query.shape)


class CutePagedMetadataBuilder(FlashAttentionMetadataBuilder):
    """FlashAttention's. A batch of nibble's has no schedule for FlashAttention 3."""

    # A graph repeats its kernels, so a batch of prompts must not run from a graph of decode steps.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        context = vllm_config.compilation_config.static_forward_context
        layers = [context[name] for name in layer_names]
        self.refusal = next((why for layer in layers if (why := _refusal(layer))), "")
        for layer in layers:
            if isinstance(layer.impl, CutePagedImpl):
                layer.impl.refusal = self.refusal
        self.most_queries = most_queries(_draft_tokens(vllm_config))
        self.most_requests = _most_requests(vllm_config)
        self.leaves_many = self.most_requests < vllm_config.scheduler_config.max_num_seqs
        self.is_early = vllm_config.kv_transfer_config is None
        self._is_decode_batch = self._is_long = False
        self.longest_graph = 0  # tokens of the longest graph for prompts beyond vLLM's sizes
        if self.refusal:
            logger.warning_once("FlashAttention computes decode steps too: %s", self.refusal)
        else:
            logger.info_once("nibble's decode attention computes decode steps (%s)", ATTENTION)

    @property
    def plans_on_host(self) -> bool:
        """Whether decode steps, or those of many requests, need what FlashAttention 3 plans."""
        return bool(self.refusal) or self.leaves_many

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CutePagedMetadata:
        common = common_attn_metadata
        decodes = (
            not self.refusal
            and common.num_reqs <= self.most_requests
            and is_decode_batch(common.max_query_len, self.most_queries, common.causal)
        )
        self._is_decode_batch = decodes
        others = self.max_cudagraph_size or 0
        self._is_long = others < common.num_actual_tokens <= self.longest_graph
        built = super().build(common_prefix_len, common, fast_build)
        if self._is_long:
            built.max_num_splits = 1
        if decodes:
            # Zero already, unless the memory was lost while the engine slept.
            workspace_of(self.device).counters.zero_()
        return CutePagedMetadata(**vars(built), decodes=decodes, early=self.is_early)

    def _get_scheduler_metadata(self, **options: Any) -> Tensor | None:
        if self._is_decode_batch:
            return None
        if self._is_long:  # a graph has room for as many parts of a row as it was captured with
            options["max_num_splits"] = 1
        return super()._get_scheduler_metadata(**options)


class CutePagedImpl(FlashAttentionImpl):
    """A layer's attention. `refusal`: why it takes FlashAttention's path in all batches."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.shape = AttentionShape(
            self.head_size, self.head_size, self.num_heads, self.num_kv_heads, self.kv_cache_dtype
        )
        config = get_current_vllm_config_or_none()
        self.refusal = refusal_of_shape(self.shape) or self._own_refusal() or _of_engine(config)
        self._is_fp8 = self.kv_cache_dtype.startswith("fp8")
        # Whether FlashAttention's path rounds queries to FP8, and whether attention_front does it.
        self.rounds_queries, self.takes_rounded = False, False
        if config is not None:
            self._requests = _most_requests(config)
            self._queries = most_queries(_draft_tokens(config))
        if not self.refusal and self._is_fp8 and self.supports_quant_query_input:
            # The layer that is being built then leaves queries in BF16.
            self.rounds_queries, self.supports_quant_query_input = True, False

    def _own_refusal(self) -> str:
        if self.attn_type != AttentionType.DECODER:
            return f"it is {self.attn_type} attention"
        if self.alibi_slopes is not None:
            return "it has ALiBi"
        if self.dcp_world_size > 1 or self.pcp_world_size > 1:
            return "its cache is split over ranks"
        if (dtype := torch.get_default_dtype()) is not torch.bfloat16:
            return f"the model computes in {dtype}"
        return ""

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        if self.rounds_queries:
            self.supports_quant_query_input = True  # for FlashAttention's path alone
        if not self.refusal:
            reserve(self.shape, self._requests, self._queries, _device())

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if decodes(attn_metadata):
            return self._decode(layer, query, kv_cache, attn_metadata, output)
        if self.takes_rounded and attn_metadata is not None:
            query = packed(query)
        elif self.rounds_queries and attn_metadata is not None:
            query = _rounded(query, layer._q_scale)
        return super().forward(
            layer,
            query,
            key,
            value,
            kv_cache,
            attn_metadata,
            output,
            output_scale,
            output_block_scale,
        )

    def _decode(
        self,
        layer: Any,
        query: Tensor,
        kv_cache: Tensor,
        metadata: CutePagedMetadata,
        output: Tensor,
    ) -> Tensor:
        return decode_attention(
            query,
            kv_cache.view(torch.float8_e4m3fn) if self._is_fp8 else kv_cache,
            metadata.block_table,
            metadata.seq_lens,
            metadata.query_start_loc,
            workspace_of(query.device),
            most_queries=metadata.max_query_len,
            scale=self.scale,
            k_scale=layer._k_scale if self._is_fp8 else None,
            v_scale=layer._v_scale if self._is_fp8 else None,
            window=self.sliding_window[0] + 1,
            soft_cap=float(self.logits_soft_cap),
            sinks=None if self.sinks is None else self.sinks.float(),
            out=output,
            early=metadata.early,
        )


class CutePagedBackend(FlashAttentionBackend):
    """FlashAttention's, with nibble's kernel for decode steps."""

    @staticmethod
    def get_name() -> str:
        return ATTENTION

    @staticmethod
    def get_impl_cls() -> type[CutePagedImpl]:
        return CutePagedImpl

    @staticmethod
    def get_builder_cls() -> type[CutePagedMetadataBuilder]:
        return CutePagedMetadataBuilder


def _refusal(layer: Any) -> str:
    """Why a loaded layer takes FlashAttention's path; empty if nibble's kernel may compute it."""
    impl = layer.impl
    if not isinstance(impl, CutePagedImpl):
        return f"a layer has {type(impl).__name__}"
    scales = (layer._k_scale, layer._v_scale) if impl.shape.cache.startswith("fp8") else ()
    if any(scale.numel() != 1 for scale in scales):
        return "each head has its own scale"
    return impl.refusal


def _of_engine(config: Any) -> str:
    """What rules the kernel out for an engine; empty if nothing does."""
    if config is None or config.model_config is None:
        return "the engine's settings are unknown"
    if envs.VLLM_BATCH_INVARIANT:
        return "results must not depend on the batch, and prompts take FlashAttention's path"
    if config.parallel_config.use_ubatching:
        return "microbatches would share its memory"
    if config.model_config.rswa_window is not None or config.model_config.is_mm_prefix_lm:
        return "tokens see more or less than those before them"
    if not most_queries(_draft_tokens(config)):
        return f"{_draft_tokens(config)} tokens are drafted at a time"
    return ""


def _most_requests(config: Any) -> int:
    choice = Options.from_config(config.additional_config).attention_kernel
    return most_requests(choice, config.scheduler_config.max_num_seqs)


def _draft_tokens(config: Any) -> int:
    speculative = config.speculative_config
    return int(getattr(speculative, "num_speculative_tokens", 0) or 0) if speculative else 0


def _rounded(query: Tensor, scale: Tensor) -> Tensor:
    """`query` in FP8, as vLLM's layer rounds it (vllm 0.32 layers/attention/attention.py:470)."""
    flat = query.reshape(len(query), -1)
    columns = -1 if scale.numel() == 1 else flat.shape[1] // scale.numel()
    rounded, _ = scaled_fp8_quant(flat, scale, group_shape=(-1, columns))
    return rounded.view(query.shape)


def _device() -> torch.device:
    if not current_platform.is_cuda():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())

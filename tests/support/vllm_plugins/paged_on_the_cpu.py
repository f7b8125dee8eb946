"""A vLLM plugin for tests: FlashAttention's layers on the CPU, as plain torch code over its own
packed cache, and nibble's kernel before attention, whose operator computes its specification there.
No part of nibble.

Norms and RoPE are torch code that rounds once, as vLLM's kernels for CUDA. Those for the CPU drop
the low bits on processors without BF16 instructions (vllm 0.32 csrc/cpu/cpu_types_x86.hpp:1102).

Does nothing unless the environment has PAGED.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn


def register() -> None:
    if "PAGED" not in os.environ:
        return
    import nibble.engine.plugin

    nibble.engine.plugin.register()
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.v1.attention.backends import flash_attn, registry

    from nibble.engine.plugin.attention import front

    front.runs_here = lambda: (True, None)
    for name in ("flash_attn_supports_kv_cache_dtype", "flash_attn_supports_quant_query_input"):
        setattr(flash_attn, name, lambda *_, **__: True)
    impl: Any = flash_attn.FlashAttentionImpl
    impl.forward, impl.do_kv_cache_update = forward, do_kv_cache_update
    RMSNorm.forward_cpu, RotaryEmbedding.forward_cpu = norm, rotate  # type: ignore[method-assign]
    registry.register_backend(registry.AttentionBackendEnum.CPU_ATTN, f"{__name__}.Backend")


def norm(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    if residual is not None:
        residual = x = x + residual
    values = x.float()
    inverse = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    y = (values * inverse * self.weight.float()).to(x.dtype)
    return y if residual is None else (y, residual)


def rotate(self: Any, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    cosines, sines = self.cos_sin_cache[positions].float().unsqueeze(1).chunk(2, -1)

    def rotated(x: Tensor) -> Tensor:
        a, b = x.unflatten(-1, (-1, self.head_size)).float().chunk(2, -1)
        turned = (a * cosines - b * sines, b * cosines + a * sines)
        return torch.cat(turned, -1).to(x.dtype).view_as(x)

    return rotated(query), rotated(key)


def as_stored(impl: Any, cache: Tensor) -> Tensor:
    return cache.view(FP8) if impl.kv_cache_dtype.startswith("fp8") else cache


def scales(impl: Any, layer: Any) -> dict[str, Any]:
    is_fp8 = impl.kv_cache_dtype.startswith("fp8")
    return {"k_scale": layer._k_scale, "v_scale": layer._v_scale} if is_fp8 else {}


def forward(
    self: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
    metadata: Any, output: Tensor, *rest: Any, **more: Any,
) -> Tensor:  # fmt: skip
    """As FlashAttention's without a cache that is split: from queries and the cache alone."""
    from nibble_kernels.decode_attention.reference import attend

    if metadata is None:
        return output.fill_(0)
    count = metadata.num_actual_tokens
    if query.dtype == FP8:
        query = query.float() * layer._q_scale
    output[:count] = attend(
        query[:count], as_stored(self, kv_cache), metadata.block_table, metadata.seq_lens,
        metadata.query_start_loc, scale=self.scale, window=self.sliding_window[0] + 1,
        **scales(self, layer),
    )[0]  # fmt: skip
    return output


def do_kv_cache_update(
    self: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor
) -> None:
    from nibble_kernels.attention_front.reference import write

    found: Any = {"k_scale": None, "v_scale": None, **scales(self, layer)}
    write(key, value, slots, as_stored(self, kv_cache), **found)


def __getattr__(name: str) -> Any:
    """The backend, whose classes need vLLM."""
    if name != "Backend":
        raise AttributeError(name)
    from vllm.v1.attention.backend import AttentionMetadataBuilder
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionMetadata

    class Builder(AttentionMetadataBuilder):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)

        def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
            names = ("num_actual_tokens", "max_query_len", "query_start_loc", "max_seq_len")
            names += ("seq_lens", "slot_mapping")
            values = {name: getattr(common, name) for name in names}
            return FlashAttentionMetadata(**values, block_table=common.block_table_tensor)

    class Backend(FlashAttentionBackend):
        @staticmethod
        def get_name() -> str:
            return "CPU_ATTN"

        @staticmethod
        def get_builder_cls() -> Any:
            return Builder

    globals()["Backend"] = Backend
    return Backend

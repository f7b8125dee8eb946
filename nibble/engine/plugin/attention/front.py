"""nibble's kernel before attention: norms of queries and keys, RoPE and the write into the KV cache
in one launch, which may begin while the product before it ends.

A suitable module becomes an object of a subclass whose forward is qkv_proj, this kernel, attention
without its own write, o_proj. The bits are those of vLLM's CUDA kernels rms_norm, rotary_embedding
and reshape_and_cache_flash, which an eager vLLM runs. vLLM's compiled code rounds less often: it
keeps float32 from norm to rotation.

Attention needs the queries alone: FlashAttention reads keys and values from the cache, unless the
cache is split over ranks (vllm 0.32 v1/attention/backends/flash_attn.py:1293).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from nibble_kernels.attention_front import attention_front
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.models import llama, mistral, qwen2, qwen3, qwen3_moe
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

from nibble.engine.decode_attention import CACHES, HEAD_DIMS
from nibble.engine.plugin.attention.backend import CutePagedImpl, decodes, packed
from nibble.engine.plugin.cuda import runs_here
from nibble.engine.plugin.loaded_models import Unsuitable, after_loading, expect, split_graphs
from nibble.engine.plugin.options import current_options
from nibble.engine.plugin.require import required, required_of_instances

logger = init_logger(f"vllm.{__name__}")

FP8 = torch.float8_e4m3fn
ROTARY_UNIT = 16  # the elements that are rotated are a multiple of this
ATTRIBUTE = "nibble_front"  # of vLLM's attention layer
# What splits vLLM's graphs, and so does this operator where vLLM's write does.
OPERATOR, WRITE = "nibble::attention_front_of_layer", "vllm::unified_kv_cache_update"

_library = torch.library.Library("nibble", "FRAGMENT")


class LayerFront:
    """The kernel's constant arguments for a layer. It keeps no reference to the parent module, of
    which vLLM's attention layer is a part.
    """

    def __init__(self, module: Any) -> None:
        self.attention: Any = module.attn
        self.heads, self.kv_heads = module.num_heads, module.num_kv_heads
        self.rotation = module.rotary_emb
        self.q_norm: Any = getattr(module, "q_norm", None)
        self.k_norm: Any = getattr(module, "k_norm", None)
        self.epsilon = 0.0 if self.q_norm is None else self.q_norm.variance_epsilon
        # As vLLM's layer decides it (vllm 0.32 layers/attention/attention.py:495).
        self.rounds_queries = (
            self.attention.query_quant is not None
            and self.attention.impl.supports_quant_query_input
        )
        # Queries are BF16 for nibble's decode attention, and FP8 for FlashAttention.
        self.may_round = isinstance(self.attention.impl, CutePagedImpl) and (
            self.attention.impl.rounds_queries
        )
        self.is_fp8 = self.attention.kv_cache_dtype.startswith("fp8")

    @property
    def q_weight(self) -> Tensor | None:
        """The weight of queries' norm."""
        return None if self.q_norm is None else self.q_norm.weight.data

    @property
    def k_weight(self) -> Tensor | None:
        """The weight of keys' norm."""
        return None if self.k_norm is None else self.k_norm.weight.data

    def __call__(
        self,
        qkv: Tensor,
        positions: Tensor,
        q: Tensor,
        cache: Tensor,
        slots: Tensor | None,
        metadata: object = None,
    ) -> None:
        """Write queries to `q`, and keys and values to the slots of the cache."""
        layer = self.attention
        packs = self.may_round and metadata is not None and not decodes(metadata)
        attention_front(
            qkv,
            positions,
            self.rotation.cos_sin_cache,
            heads=self.heads,
            kv_heads=self.kv_heads,
            neox=self.rotation.is_neox_style,
            q_weight=self.q_weight,
            k_weight=self.k_weight,
            epsilon=self.epsilon,
            slots=slots,
            cache=None if slots is None else cache.view(FP8) if self.is_fp8 else cache,
            k_scale=layer._k_scale if self.is_fp8 else None,
            v_scale=layer._v_scale if self.is_fp8 else None,
            q_scale=layer._q_scale if self.rounds_queries or packs else None,
            out=packed(q) if packs else q,
        )


def front_of(layer: Any) -> LayerFront | None:
    """The kernel's arguments for vLLM's attention layer, if it computes what precedes the layer."""
    return getattr(layer, ATTRIBUTE, None)


def _front_of_layer(qkv: Tensor, positions: Tensor, q: Tensor, layer_name: Any) -> None:
    """As vLLM's unified_kv_cache_update: without slots, while vLLM measures memory, there is no
    cache to write.
    """
    metadata, layer, cache, slots = get_attention_context(_resolve_layer_name(layer_name))
    getattr(layer, ATTRIBUTE)(qkv, positions, q, cache, slots, metadata)


# The types themselves, which torch makes the operator's schema of.
_front_of_layer.__annotations__ = {
    **dict.fromkeys(("qkv", "positions", "q"), Tensor),
    "layer_name": LayerNameType,
    "return": None,
}
direct_register_custom_op(
    OPERATOR.rpartition(":")[2],
    _front_of_layer,
    mutates_args=["q"],
    fake_impl=lambda qkv, positions, q, layer_name: None,
    target_lib=_library,
)


def attend(layer: Any, qkv: Tensor, positions: Tensor) -> Tensor:
    """Attention of rows of queries, keys and values: [tokens, heads · D].

    `layer` is vLLM's, with a LayerFront. Between the two operators nothing is computed, so that
    vLLM keeps them in one piece of a split graph.
    """
    front = getattr(layer, ATTRIBUTE)
    shape = (qkv.shape[0], layer.num_heads, layer.head_size)
    dtype = FP8 if front.rounds_queries else qkv.dtype
    q = torch.empty(shape, dtype=dtype, device=qkv.device)
    output = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
    name = _encode_layer_name(layer.layer_name)
    torch.ops.nibble.attention_front_of_layer(qkv, positions, q, name)
    # The operator wants keys and values, and does not read them.
    torch.ops.vllm.unified_attention_with_output(q, q, q, output, name)
    return output.view(-1, layer.num_heads * layer.head_size)


class _WithFront:
    """The forward of an attention module whose inner layer has a LayerFront."""

    qkv_proj: Any
    o_proj: Any
    attn: Any

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        output, _ = self.o_proj(attend(self.attn, qkv, positions))
        return output


# Classes of vLLM 0.32 whose forward is qkv_proj, norms of heads if they have any, RoPE, attention,
# o_proj -> the same with the kernel. They keep their names, which messages of vLLM have.
MODULES: dict[type, type] = {
    known: type(known.__name__, (_WithFront, known), {"__module__": __name__})
    for known in (
        llama.LlamaAttention,
        mistral.MistralAttention,
        qwen2.Qwen2Attention,
        qwen3.Qwen3Attention,
        qwen3_moe.Qwen3MoeAttention,
    )
}


def follow_loading() -> None:
    """Use the kernel in every model that vLLM loads in this process with the option
    attention_front.

    Raises VllmMismatch.
    """
    for known in MODULES:
        required(known, "forward", "self", "positions", "hidden_states")
        required_of_instances(known, *("qkv_proj", "o_proj", "attn", "rotary_emb", "head_dim"))
        required_of_instances(known, "num_heads", "num_kv_heads")
    required_of_instances(Attention, *("query_quant", "kv_cache_dtype", "use_direct_call"))
    required_of_instances(RMSNorm, "variance_epsilon", "variance_size_override", "has_weight")
    required_of_instances(FlashAttentionImpl, "sinks", "alibi_slopes")

    def change(model: nn.Module) -> None:
        if current_options().attention_front != "on":
            return
        is_here, why = runs_here()
        reasons = replace_fronts(model, get_current_vllm_config()) if is_here else [str(why)]
        for reason in reasons:
            logger.info_once("vLLM computes norms of heads, RoPE and cache writes: %s", reason)
        if any(isinstance(module, _WithFront) for module in model.modules()):
            logger.info_once("nibble's kernel computes norms of heads, RoPE and cache writes")

    after_loading(change)


def replace_fronts(model: nn.Module, config: Any) -> list[str]:
    """Let the kernel compute what precedes attention in each suitable module of a loaded model.

    Returns why modules keep vLLM's code, each reason once.
    """
    reasons, replaced = dict[str, None](), False
    for module in attention_modules(model):
        try:
            _check(module, config)
        except Unsuitable as reason:
            reasons[str(reason)] = None
            continue
        front = LayerFront(module)
        setattr(module.attn, ATTRIBUTE, front)
        if front.may_round:
            module.attn.impl.takes_rounded = True
        module.__class__ = MODULES[type(module)]
        replaced = True
    if replaced:
        split_graphs(config.compilation_config, OPERATOR, beside=WRITE)
    return list(reasons)


def attention_modules(model: nn.Module) -> Iterator[Any]:
    """Modules around vLLM's attention layers."""
    for module in model.modules():
        if isinstance(getattr(module, "attn", None), Attention):
            yield module


def _check(module: Any, config: Any) -> None:
    """Raise Unsuitable if the kernel would compute something else than the module."""
    expect(type(module) in MODULES, f"{type(module).__name__} is not known")
    parallel = config.parallel_config
    splits = (parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size)
    expect(max(splits) == 1, "a cache that is split over ranks needs keys and values themselves")
    expect(
        config.model_config.dtype == torch.bfloat16, f"it computes in {config.model_config.dtype}"
    )
    expect(not getattr(module, "dual_chunk_attention_config", None), "it has two chunks")
    expect(not getattr(module, "do_llama_4_scaling", False), "its queries are scaled by position")
    expect(not _hooks(module), "its parts have hooks")
    _check_rotation(module)
    _check_norms(module)
    _check_layer(module)


def _check_rotation(module: Any) -> None:
    rotation: Any = module.rotary_emb
    kind = type(rotation)
    is_plain = isinstance(rotation, RotaryEmbedding) and (
        kind.forward_cuda,
        kind.forward_native,
    ) == (
        RotaryEmbedding.forward_cuda,
        RotaryEmbedding.forward_native,
    )
    expect(is_plain, f"its rotation is {kind.__name__}")
    table = rotation.cos_sin_cache
    expect(table.dtype == torch.bfloat16 and table.is_contiguous(), "its cosines are not bfloat16")
    expect(rotation.head_size == module.head_dim, "its rotation has heads of another size")
    expect(
        table.shape[1] == rotation.rotary_dim and rotation.rotary_dim % ROTARY_UNIT == 0,
        f"{rotation.rotary_dim} elements of a head are rotated",
    )


def _check_norms(module: Any) -> None:
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    found: list[Any] = [norm for norm in norms if norm is not None]
    expect(len(found) != 1, "queries or keys alone have a norm")
    for norm in found:
        is_plain = type(norm) is RMSNorm and norm.variance_size_override is None and norm.has_weight
        expect(is_plain, f"a norm of heads is {type(norm).__name__}")
        expect(
            norm.weight.dtype == torch.bfloat16 and norm.weight.shape == (module.head_dim,),
            "the weight of a norm is not bfloat16, or not of one head",
        )
    expect(len({norm.variance_epsilon for norm in found}) <= 1, "its norms have two epsilons")


def _check_layer(module: Any) -> None:
    layer, impl = module.attn, module.attn.impl
    expect(type(layer) is Attention, f"its layer is {type(layer).__name__}")
    expect(layer.attn_type == AttentionType.DECODER, f"it is {layer.attn_type} attention")
    expect(type(impl) in (FlashAttentionImpl, CutePagedImpl), f"it has {type(impl).__name__}")
    expect(not layer.use_direct_call, "its attention is not an operator")
    expect(
        not layer.attn_backend.forward_includes_kv_cache_update, "attention writes the cache itself"
    )
    expect(not layer.kv_sharing_target_layer_name, "layers share a cache")
    expect(not layer.has_sink and impl.sinks is None, "it has sinks")
    expect(impl.alibi_slopes is None, "it has ALiBi")
    sizes = (layer.head_size, layer.head_size_v, module.head_dim)
    expect(len(set(sizes)) == 1 and layer.head_size in HEAD_DIMS, f"its heads have {sizes[0]}")
    expect(
        (layer.num_heads, layer.num_kv_heads) == (module.num_heads, module.num_kv_heads),
        "its layer has other heads",
    )
    expect(layer.kv_cache_dtype in CACHES, f"its KV cache is {layer.kv_cache_dtype}")
    scales = (layer._q_scale, layer._k_scale, layer._v_scale)
    expect(all(scale.numel() == 1 for scale in scales), "each head has its own scale")


def _hooks(module: Any) -> bool:
    """Whether something is to see the calls of parts that are no longer called."""
    names = ("q_norm", "k_norm", "rotary_emb", "attn")
    parts = [part for name in names if isinstance(part := getattr(module, name, None), nn.Module)]
    return any(part._forward_hooks or part._forward_pre_hooks for part in parts)

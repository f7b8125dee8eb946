"""The layers of dense decoders with NVFP4 products as a few operators, on vLLM's CPU platform.

vLLM's modules stay, with their names and weights: a check of a start that hooks one of them, and
whatever is not known here, is computed by them. Not in compiled models.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import nibble_kernels
import torch
from nibble_kernels.decoder import Decoder, DecoderLayer, Product, Shape
from nibble_kernels.nvfp4_linear.packed import PackedWeight
from torch import Tensor, nn
from vllm.config import CompilationMode, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

from nibble.engine.plugin.cpu import CpuNvFp4LinearKernel
from nibble.engine.plugin.layers import COLUMN_SCALE, kernel_of
from nibble.engine.plugin.loaded_models import Unsuitable, after_loading, expect
from nibble.engine.plugin.plain_decoders import LAYERS, MODELS
from nibble.engine.plugin.require import replace, required, required_of_instances

logger = init_logger(f"vllm.{__name__}")  # vLLM shows messages of loggers below this name

# Those whose rotation is the cache's row of a position.
ROTATIONS = frozenset("RotaryEmbedding Llama3RotaryEmbedding YaRNScalingRotaryEmbedding".split())
# vLLM's CPU attention without AMX stores keys by column, and with it in another order.
CACHE_LAYOUT, AMX_LAYOUT = "vec", "amx"
_PLAIN = (None, "auto", "bfloat16")  # types of a cache
# With AVX-512 vLLM's attention multiplies in BF16, and is faster for sequences of more tokens:
# docs/kernels/nvfp4_cpu.md.
MOST_ATTENDED_TOKENS = 128


def follow_loading() -> None:
    """Replace the layers of every model that vLLM loads in this process.

    Raises VllmMismatch.
    """
    if not current_platform.is_cpu():
        return
    for model in MODELS:
        required(model, "forward", "self", "input_ids", "positions", "intermediate_tensors")
    for layer in LAYERS:
        required_of_instances(layer, "self_attn", "mlp", "input_layernorm")
        required_of_instances(layer, "post_attention_layernorm")
    required_of_instances(CPUAttentionMetadata, "max_query_len", "block_table", "seq_lens")
    required_of_instances(CPUAttentionBackendImpl, "alibi_slopes", "logits_soft_cap", "sinks")
    required_of_instances(CPUAttentionBackendImpl, "sliding_window", "scale", "kv_cache_dtype")
    follow_the_layout()

    def change(model: nn.Module) -> None:
        config = get_current_vllm_config()
        is_eager = config.compilation_config.mode == CompilationMode.NONE
        is_alone = config.parallel_config.world_size == 1 and config.lora_config is None
        if is_eager and is_alone and nibble_kernels.implementations()["cpu"] == "compiled":
            for module in model.modules():
                if type(module) in MODELS:
                    replace_layers(module)

    after_loading(change)


def follow_the_layout() -> None:
    """No layout for AMX once operators compute whole steps, because they do not read it. vLLM
    chooses after loading (vllm 0.32 cpu_attn.py:157).

    Raises VllmMismatch.
    """
    name = "_get_attn_isa"
    layout_of = required(cpu_attn, name, "dtype", "block_size", "head_size", "kv_cache_dtype")

    @functools.wraps(layout_of)
    def layout_for_operators(
        dtype: torch.dtype,
        block_size: int,
        head_size: int | None = None,
        kv_cache_dtype: str | None = None,
    ) -> str:
        layout = layout_of(dtype, block_size, head_size, kv_cache_dtype)
        operators_read_it = OperatorForward.has_whole_steps and kv_cache_dtype in _PLAIN
        return CACHE_LAYOUT if layout == AMX_LAYOUT and operators_read_it else layout

    replace(cpu_attn, name, layout_for_operators)


def replace_layers(model: Any) -> None:
    """Let operators compute the layers of a model, if they can."""
    try:
        layers = [_known(layer) for layer in model.layers]
        model.forward = OperatorForward(model, layers).forward
    except Unsuitable as reason:
        logger.info_once("decoder layers are computed by vLLM's modules: %s", str(reason))


def attend(new_tokens: int, tokens: int, has_avx512: bool) -> bool:
    """Whether the operators' attention is as fast as vLLM's, for a step whose sequences have up to
    so many new tokens, and so many in all.
    """
    return new_tokens == 1 or not has_avx512 or tokens <= MOST_ATTENDED_TOKENS


def operators_of(model: Any) -> OperatorForward | None:
    """The operators that compute the layers of a causal model, if there are any."""
    found = getattr(model.model.forward, "__self__", None)
    return found if isinstance(found, OperatorForward) else None


def _known(layer: Any) -> Any:
    expect(type(layer) in LAYERS, f"a {type(layer).__name__}")
    attention = layer.self_attn
    expect(getattr(layer, "ada_rms_norm_t_cond", None) is None, "norms with a condition")
    expect(not getattr(attention, "do_llama_4_scaling", False), "scaled queries")
    expect(type(layer.mlp.act_fn) is SiluAndMul, "another activation")
    expect(type(attention.rotary_emb).__name__ in ROTATIONS, "another rotation")
    expect(attention.rotary_emb.is_neox_style, "a rotation of neighbours")
    expect(attention.rotary_emb.head_size == attention.head_dim, "heads of two sizes")
    inner: Any = attention.attn
    impl = inner.impl
    is_plain = type(inner) is Attention and isinstance(impl, CPUAttentionBackendImpl)
    expect(is_plain and inner.attn_type == AttentionType.DECODER, "another attention")
    expect(not (impl.logits_soft_cap or impl.sinks is not None), "capped logits or sinks")
    expect(impl.alibi_slopes is None and not inner.kv_sharing_target_layer_name, "ALiBi")
    return layer


class OperatorForward:
    """The forward of a model through nibble::decoder_….

    `has_whole_steps`: a model of this process has steps that are one operator.
    """

    has_whole_steps = False

    def __init__(self, model: Any, layers: Sequence[Any]) -> None:
        self._model, self._modules_forward = model, model.forward
        self._attention = [layer.self_attn.attn for layer in layers]
        first = layers[0].self_attn
        rotation = first.rotary_emb
        norms = [norm for layer in layers for norm in _norms(layer)] + [model.norm]
        epsilons = {norm.variance_epsilon for norm in norms if norm is not None}
        expect(all(_is_plain(norm) for norm in norms if norm is not None), "another norm")
        expect(len(epsilons) == 1, "norms with several epsilons")
        tables = {layer.self_attn.rotary_emb.cos_sin_cache.data_ptr() for layer in layers}
        expect(len(tables) == 1, "several rotations")
        expect(len({attention.impl.scale for attention in self._attention}) == 1, "scales")
        hidden, intermediate = len(model.norm.weight), _rows(layers[0].mlp.gate_up_proj) // 2
        expect(intermediate % 16 == 0 and first.head_dim % 16 == 0, "sizes that 16 divides not")
        shape = Shape(
            hidden,
            intermediate,
            first.num_heads,
            first.num_kv_heads,
            first.head_dim,
            epsilons.pop(),
            self._attention[0].impl.scale,
        )
        table = rotation.cos_sin_cache.to(torch.bfloat16)
        parts = [_layer(layer) for layer in layers]
        self._decoder = Decoder(parts, model.norm.weight.data, table, shape)
        queries, keys = shape.queries * shape.head_size, shape.keys * shape.head_size
        self._parts = [queries, keys, keys]
        windows = {attention.impl.sliding_window for attention in self._attention}
        self._window = max(0, windows.pop()) if len(windows) == 1 else None
        self._has_plain_cache = all(
            attention.kv_cache_dtype in _PLAIN for attention in self._attention
        )
        if self._window is not None and self._has_plain_cache:
            OperatorForward.has_whole_steps = True
        self._hooks = [
            hooks
            for module in (*layers, *(part for layer in layers for part in layer.modules()))
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **rest: Any,
    ) -> Any:
        """As the model's own. A layer or a part of one that is hooked is called."""
        model = self._model
        if intermediate_tensors is not None or rest or positions.ndim != 1 or not self._computes():
            return self._modules_forward(
                input_ids, positions, intermediate_tensors, inputs_embeds, **rest
            )
        given = inputs_embeds is not None
        residual = inputs_embeds.clone() if given else model.embed_input_ids(input_ids)
        if (step := self._step(len(residual))) is not None:
            return step(residual, positions)
        hidden: Tensor | None = None
        for number, attention in enumerate(self._attention):
            qkv = self._decoder.before_attention(number, hidden, residual, positions)
            attended = attention(*qkv.split(self._parts, dim=-1))
            hidden = self._decoder.after_attention(number, attended, residual)
        assert hidden is not None
        return self._decoder.last_norm(hidden, residual)

    def has_steps(self) -> bool:
        """Whether the layers and their cache are, at this moment, what `step` knows."""
        return self._computes() and self._reads_cache()

    def step(
        self, input_ids: Tensor, positions: Tensor, slots: Tensor, blocks: Tensor, lengths: Tensor
    ) -> Tensor:
        """The normalized hidden states of one new token for each sequence, as Decoder.step."""
        return self._all_layers(
            self._model.embed_input_ids(input_ids), positions, slots, blocks, lengths
        )

    def _computes(self) -> bool:
        """Whether the operators do all that the modules would do now."""
        return not getattr(self._model, "aux_hidden_state_layers", None) and not any(self._hooks)

    def _reads_cache(self) -> bool:
        is_readable = getattr(self._attention[0], "isa", None) == CACHE_LAYOUT
        return self._window is not None and self._has_plain_cache and is_readable

    def _all_layers(
        self,
        residual: Tensor,
        positions: Tensor,
        slots: Tensor,
        blocks: Tensor,
        lengths: Tensor,
        starts: Tensor | None = None,
    ) -> Tensor:
        caches = [each.kv_cache for each in self._attention]
        given = (slots, blocks, lengths, self._window or 0, starts)
        return self._decoder.step(residual, positions, caches, *given)

    def _step(self, tokens: int) -> Callable[[Tensor, Tensor], Tensor] | None:
        """All layers at once, where they know the cache; else None."""
        first, context = self._attention[0], get_forward_context()
        metadata, slots = context.attn_metadata, context.slot_mapping
        if not (isinstance(metadata, dict) and isinstance(slots, dict) and self._reads_cache()):
            return None
        own, own_slots = metadata.get(first.layer_name), slots.get(first.layer_name)
        if (
            not isinstance(own, CPUAttentionMetadata)
            or own_slots is None
            or own.causal is not True
            or not attend(own.max_query_len, own.max_seq_len, torch.cpu._is_avx512_supported())
            or own.num_actual_tokens != tokens
            or len(own.query_start_loc) != len(own.seq_lens) + 1
            or own.query_start_loc[-1] != tokens
            or len({id(metadata[each.layer_name]) for each in self._attention}) != 1
        ):
            return None
        return lambda residual, positions: self._all_layers(
            residual, positions, own_slots, own.block_table, own.seq_lens, own.query_start_loc
        )


def _norms(layer: Any) -> tuple[Any, ...]:
    attention = layer.self_attn
    heads = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return (layer.input_layernorm, layer.post_attention_layernorm, *heads)


def _is_plain(norm: Any) -> bool:
    is_known = type(norm) is RMSNorm and norm.variance_size_override is None
    return is_known and norm.has_weight and norm.weight.dtype == torch.bfloat16


def _rows(linear: Any) -> int:
    kernel = kernel_of(linear)
    expect(isinstance(kernel, CpuNvFp4LinearKernel), "products that are not NVFP4")
    return kernel.rows


def _layer(layer: Any) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    products = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    qkv, output, gate_up, down = map(_product, products)
    norms: list[Any] = [None if norm is None else norm.weight.data for norm in _norms(layer)]
    return DecoderLayer(qkv, output, gate_up, down, *norms)


def _product(linear: Any) -> Product:
    rows, bias = _rows(linear), getattr(linear, "bias", None)
    expect(bias is None or bias.dtype == torch.bfloat16, "a bias that is not bfloat16")
    return Product(
        PackedWeight(linear.weight.data, linear.weight_scale.data, rows),
        linear.weight_global_scale.data,
        column_scale=getattr(linear, COLUMN_SCALE, None),
        bias=None if bias is None else bias.data,
        input_scale_inv=getattr(linear, "input_global_scale_inv", None),
    )

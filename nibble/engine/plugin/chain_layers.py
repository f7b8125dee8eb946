"""Decoder layers whose kernels begin while the one before ends, on GPUs, when a model is loaded.

nibble's products let their successor begin early, and fetch their own weights before they wait for
their predecessor. vLLM's norm between two of them, compiled by inductor, does neither. So the sum
with the residual moves into the product before the norm, and nibble::rms_norm takes the norm's
place. Where the products after a norm are nibble's too, one operator computes them with the norm:
from 9 rows on, on SM90, the norm writes in the order in which the product reads, or needs no
kernel. So a layer computes the next one's queries, keys and values.

Names of modules stay: checks of a start find and hook them. While parts of a layer have hooks, they
are called one by one.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from nibble_kernels.nvfp4_linear import norm_linear
from nibble_kernels.nvfp4_linear.norm_linear import (
    nvfp4_between_attentions,
    nvfp4_norm_linear,
    nvfp4_norm_mlp,
)
from nibble_kernels.rms_norm import MAX_COLUMNS, add_rms_norm, rms_norm
from torch import Tensor, nn
from torch.nn import Parameter
from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models import llama, mistral, qwen2, qwen3, qwen3_moe

from nibble.engine.plugin.cuda import NibbleNvFp4LinearKernel
from nibble.engine.plugin.fuse_silu import PLAIN_MLPS, GateUpSiluMul, nibble_kernel_of
from nibble.engine.plugin.loaded_models import after_loading
from nibble.engine.plugin.plain_decoders import LAYERS, MODELS
from nibble.engine.plugin.require import required, required_of_instances

logger = init_logger(f"vllm.{__name__}")  # vLLM shows messages of loggers below this name

# Attention ends with o_proj.
ATTENTION = (
    llama.LlamaAttention,
    mistral.MistralAttention,
    qwen2.Qwen2Attention,
    qwen3.Qwen3Attention,
)


def follow_loading() -> None:
    """Chain the layers of every model that vLLM loads in this process.

    Raises VllmMismatch.
    """
    required_of_instances(VllmConfig, "lora_config", "parallel_config")
    for model in MODELS:
        required(model, "forward", "self", "input_ids", "positions", "intermediate_tensors")
    for layer in LAYERS:
        required(layer, "forward", "self", "positions", "hidden_states", "residual")
        required_of_instances(layer, "self_attn", "mlp", "input_layernorm")
        required_of_instances(layer, "post_attention_layernorm")

    def chain(model: nn.Module) -> None:
        config = get_current_vllm_config()
        if config.parallel_config.world_size == 1 and config.lora_config is None:
            chain_layers(model)

    after_loading(chain)


def chain_layers(model: nn.Module) -> None:
    """Chain the layers of each known model whose products are all nibble's, on one GPU. Of layers
    with experts, replace the norm before attention alone: experts add no residual.
    """
    for part in list(model.modules()):
        if type(part) is qwen3_moe.Qwen3MoeDecoderLayer:
            layer: Any = part
            if nibble_kernel_of(layer.self_attn.qkv_proj) and _is_plain(layer.input_layernorm):
                layer.input_layernorm = Norm(layer.input_layernorm)
        if type(part) not in MODELS:
            continue
        known: Any = part
        if _is_plain(known.norm) and all(map(_is_known, known.layers)):
            for place, one in enumerate(known.layers):
                known.layers[place] = ChainedLayer(one)
            for one, following in pairwise(known.layers):
                one.lead_to(following, known)
            known.norm = LastNorm(known.norm)
        else:
            logger.info_once("norms and residual sums are computed by vLLM's layers")


def _is_known(layer: Any) -> bool:
    if type(layer) not in LAYERS or getattr(layer, "ada_rms_norm_t_cond", None) is not None:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if type(attention) not in ATTENTION or type(mlp).__name__ not in PLAIN_MLPS:
        return False
    kernels = [nibble_kernel_of(linear) for linear in (attention.o_proj, mlp.down_proj)]
    if any(kernel is None or kernel.is_sparse for kernel in kernels):
        return False
    return all(_is_plain(norm) for norm in (layer.input_layernorm, layer.post_attention_layernorm))


def _is_plain(norm: Any) -> bool:
    if type(norm) is not RMSNorm or norm.variance_size_override is not None:
        return False
    weight = norm.weight
    fits = len(weight) % 8 == 0 and len(weight) <= MAX_COLUMNS
    return norm.has_weight and fits and weight.is_contiguous()


class ChainedLayer(nn.Module):
    """A decoder layer that returns the sum of its output and the residual, and instead of a
    residual queries, keys and values of the next layer, or None.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm = Norm(layer.input_layernorm)
        self.post_attention_layernorm = Norm(layer.post_attention_layernorm)
        self.self_attn.o_proj = Deferred(self.self_attn.o_proj)
        self.mlp.down_proj = Deferred(self.mlp.down_proj)
        qkv, gate_up = self.self_attn.qkv_proj, self.mlp.gate_up_proj
        kernel = nibble_kernel_of(qkv)
        self.fuses_qkv = kernel is not None and kernel.after_norm(qkv) is not None
        if self.fuses_qkv:
            self.self_attn.qkv_proj = Deferred(qkv)
        self.fuses_mlp = (
            type(gate_up) is GateUpSiluMul
            and _after_norm(gate_up) is not None
            and _after_norm(self.mlp.down_proj) is not None
        )
        # Not submodules: they have their names elsewhere.
        self.following: tuple[ChainedLayer, ...] = ()
        self.model: tuple[Any, ...] = ()

    def lead_to(self, following: ChainedLayer, model: Any) -> None:
        """Compute queries, keys and values of the layer after this one, in this model."""
        if self.fuses_mlp and following.fuses_qkv:
            self.following, self.model = (following,), (model,)

    def forward(
        self,
        positions: Tensor,
        hidden_states: Tensor,
        residual: Tensor | None = None,
        t_cond: None = None,  # Mistral's; layers with such a condition are not chained
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [tokens, hidden size]. residual: what the layer before returned."""
        stream, attention = hidden_states, self.self_attn
        fuses = torch.compiler.is_compiling() or not self._is_watched()
        if self.fuses_qkv and attention.qkv_proj.is_deferred != fuses:
            attention.qkv_proj.is_deferred = fuses
        if residual is not None:
            before_attention = residual
        elif fuses and self.fuses_qkv:
            before_attention = self.normed_qkv(stream)
        else:
            before_attention = self.input_layernorm(stream)
        attended = attention(positions=positions, hidden_states=before_attention)
        if fuses and self._leads_on():
            return self.up_to_next_attention(stream, attended)
        stream = attention.o_proj.added_to(stream, attended)
        if fuses and self.fuses_mlp:
            return self.with_mlp(stream), None
        between = self.mlp(self.post_attention_layernorm(stream))
        return self.mlp.down_proj.added_to(stream, between), None

    def up_to_next_attention(self, stream: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """The stream after this layer, and the next one's queries, keys and values."""
        following = self.following[0]
        gate_up, down = _after_norm(self.mlp.gate_up_proj), _after_norm(self.mlp.down_proj)
        o, qkv = _after_norm(self.self_attn.o_proj), _after_norm(following.self_attn.qkv_proj)
        assert o is not None and gate_up is not None and down is not None and qkv is not None
        norm, next_norm = self.post_attention_layernorm, following.input_layernorm
        return nvfp4_between_attentions(
            attended,
            stream,
            o,
            norm.of_kernel,
            gate_up,
            down,
            next_norm.of_kernel,
            qkv,
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
        )

    def normed_qkv(self, stream: Tensor) -> Tensor:
        """Queries, keys and values of the normed stream."""
        layer = _after_norm(self.self_attn.qkv_proj)
        assert layer is not None
        norm, invariant = self.input_layernorm.of_kernel, envs.VLLM_BATCH_INVARIANT
        return nvfp4_norm_linear(stream, norm, layer, batch_invariant=invariant)

    def with_mlp(self, stream: Tensor) -> Tensor:
        """The stream plus the MLP's result of the normed stream."""
        gate_up, down = _after_norm(self.mlp.gate_up_proj), _after_norm(self.mlp.down_proj)
        assert gate_up is not None and down is not None
        norm, invariant = self.post_attention_layernorm.of_kernel, envs.VLLM_BATCH_INVARIANT
        return nvfp4_norm_mlp(stream, norm, gate_up, down, batch_invariant=invariant)

    def _leads_on(self) -> bool:
        """Whether the next layer gets queries, keys and values from this one. Not where something
        is to see what layers take and return: hooks, or a model whose drafter takes their sums
        (EagleModelMixin).
        """
        if not self.following or self.model[0].aux_hidden_state_layers:
            return False
        following = self.following[0]
        is_seen = _has_hooks(self) or _has_hooks(following) or following._is_watched()
        return torch.compiler.is_compiling() or not is_seen

    def _is_watched(self) -> bool:
        """Whether something is to see the calls of parts that are not called if layers fuse."""
        names = ("self_attn.qkv_proj", "mlp", "mlp.gate_up_proj", "mlp.down_proj")
        parts = [self.input_layernorm, self.post_attention_layernorm]
        parts += [self.get_submodule(name) for name in names]
        return any(map(_has_hooks, parts))


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _after_norm(part: Any) -> norm_linear.LinearLayer | None:
    """Of a Deferred or GateUpSiluMul."""
    return part.kernel.after_norm(part.layer)


class Norm(nn.Module):
    """vLLM's RMSNorm through nibble::rms_norm. With a residual: (output, sum)."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = Parameter(norm.weight.data, requires_grad=False)
        self.variance_epsilon: float = norm.variance_epsilon

    @property
    def of_kernel(self) -> norm_linear.Norm:
        return norm_linear.Norm(self.weight, self.variance_epsilon)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """x [tokens, hidden size]."""
        if residual is None:
            return rms_norm(x, self.weight, self.variance_epsilon)
        return add_rms_norm(x, residual, self.weight, self.variance_epsilon)


class LastNorm(Norm):
    """The norm after chained layers, which leave no residual. Always (output, sum)."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return rms_norm(total, self.weight, self.variance_epsilon), total


class Deferred(nn.Module):
    """A linear layer of vLLM in its place. Called there it returns its input; the layer around it
    computes the product, with the norm before it, or with the residual by `added_to`.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.is_deferred = layer, True
        kernel = nibble_kernel_of(layer)
        assert isinstance(kernel, NibbleNvFp4LinearKernel)
        self.kernel = kernel

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return (x, None) if self.is_deferred else self.layer(x)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual plus the product of x [tokens, K]."""
        layer: Any = self.layer
        return self.kernel.apply_weights(layer, x, layer.bias, residual=residual)

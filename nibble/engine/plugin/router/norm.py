"""The norm in front of a router of experts, in the router's kernel.

With it comes the factor of a shared expert, sigmoid of its gate's product. The routed experts'
kernel takes it with the expert (shared_expert.py). Where it does not, the block multiplies by it
where it adds the shared expert's output, which torch compiles into one kernel with the next norm.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from nibble_kernels.router import norm_route_experts
from torch import Tensor
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.models.qwen2_moe import Qwen2MoeMLP
from vllm.utils.torch_utils import direct_register_custom_op

from nibble.engine.plugin.router.gate import Route, padding

# Classes of vLLM 0.32. A block's forward is experts(x, x); a layer's gives the norm's results to
# the block and to the next layer unchanged.
BLOCKS = frozenset("Qwen3MoeSparseMoeBlock Qwen3NextSparseMoeBlock".split())
LAYERS = frozenset("Qwen3MoeDecoderLayer Qwen3NextDecoderLayer Qwen3_5DecoderLayer".split())


def fuse_norm(layer: Any, fused: dict[int, Route]) -> Any:
    """The layer's block, if the norm in front of its experts is now fused into the router."""
    if type(layer).__name__ not in LAYERS or type(layer.mlp).__name__ not in BLOCKS:
        return None
    norm, block = layer.post_attention_layernorm, layer.mlp
    runner = block.experts
    if id(runner) not in fused or not _is_known(norm) or norm.weight.dtype != torch.bfloat16:
        return None
    if getattr(layer, "layer_scale", False) or getattr(block, "replicate_shared_expert", False):
        return None
    if runner.moe_config.moe_parallel_config.tp_size > 1:
        return None  # vLLM may fuse this norm with the all-reduce before it
    norm.__class__ = _norm_class(type(norm))
    # Tuples, so that the gates are not the norm's submodules.
    norm.fused_gate, norm.shared_gate = (runner.gate,), (_take_shared_gate(block),)
    block.scales_shared, block.joins_shared = norm.shared_gate != (None,), False
    block.__class__ = _block_class(type(block))
    runner.gate = None
    return block


def _take_shared_gate(block: Any) -> Any:
    """The gate of the block's shared expert, which no longer multiplies by it; None if another
    layer's sum than the block's has the shared expert.
    """
    expert, gate = getattr(block, "shared_expert", None), getattr(block, "shared_expert_gate", None)
    runner = block.experts
    holder = runner._shared_experts
    if type(expert) is not Qwen2MoeMLP or holder is None or holder._layer is not expert:
        return None
    if type(gate) is not ReplicatedLinear or expert.expert_gate is not gate:
        return None
    if not isinstance(gate.quant_method, UnquantizedLinearMethod) or gate.bias is not None:
        return None
    weight = gate.weight
    if weight.dtype != torch.bfloat16 or weight.shape != (1, runner.moe_config.hidden_dim):
        return None
    if runner.routed_scaling_factor != 1.0 or runner.routed_output_transform is not None:
        return None
    expert.expert_gate = None
    return gate


def _is_known(norm: Any) -> bool:
    if type(norm) is RMSNorm:
        return norm.has_weight and norm.variance_size_override is None
    return type(norm) is GemmaRMSNorm


@functools.cache
def _norm_class(base: type) -> type:
    return type(f"Nibble{base.__name__}", (base,), {"forward": _norm_and_route})


def _norm_and_route(self: Any, x: Tensor, residual: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """The norm's forward: ((normed, the router's result, the shared expert's factors), sum)."""
    (fused,), (shared,) = self.fused_gate, self.shared_gate
    route = fused.route
    normed, total, choices, factors = torch.ops.vllm.nibble_norm_route_experts(
        x,
        residual,
        self.weight,
        self.variance_epsilon,
        1.0 if isinstance(self, GemmaRMSNorm) else 0.0,
        None if shared is None else shared.weight,
        fused.gate.weight,
        route.topk,
        route.sigmoid,
        route.renormalize,
        route.bias,
        route.scale,
        route.round_logits,
    )
    return (normed, choices, factors), total


@functools.cache
def _block_class(base: type) -> type:
    return type(f"Nibble{base.__name__}", (base,), {"forward": _experts_of_routed})


def _experts_of_routed(self: Any, hidden_states: tuple[Tensor, ...], *rest: Any) -> Tensor:
    """The block's forward, for what the norm before it returns."""
    if isinstance(hidden_states, Tensor):
        raise TypeError("expected the results of the norm in front of this block")
    x, choices, factors = hidden_states
    runner = self.experts
    if not self.scales_shared:
        return runner(hidden_states=x, router_logits=choices)
    # Of the runner's forward what is left on one GPU, without transforms and padding. vLLM gives
    # the routed experts what its shared one would get.
    given = factors if self.joins_shared else x
    found = runner._forward_entry(x, choices, given, None, runner._encode_layer_name(), 0)
    if self.joins_shared:
        return found
    shared, routed = found
    return shared * factors + routed


def _norm_route_experts(
    x: Tensor,
    residual: Tensor,
    norm: Tensor,
    epsilon: float,
    norm_offset: float,
    shared_gate: Tensor | None,
    gate: Tensor,
    topk: int,
    sigmoid: bool,
    renormalize: bool,
    bias: Tensor | None,
    scale: float,
    round_logits: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return norm_route_experts(
        x, residual, norm, epsilon, gate, topk, norm_offset=norm_offset, shared_gate=shared_gate,
        sigmoid=sigmoid, renormalize=renormalize, bias=bias, scale=scale, round_logits=round_logits,
        padding=padding(len(x)),
    )  # fmt: skip


def _norm_route_experts_fake(
    x: Tensor,
    residual: Tensor,
    norm: Tensor,
    epsilon: float,
    norm_offset: float,
    shared_gate: Tensor | None,
    gate: Tensor,
    topk: int,
    *rest: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    choices = x.new_empty((2, x.shape[0], topk), dtype=torch.float32)
    factors = x.new_empty((0 if shared_gate is None else x.shape[0], 1))
    return torch.empty_like(x), torch.empty_like(x), choices, factors


# An operator of vLLM's, so that compiled models call it with the step's padding.
direct_register_custom_op(
    op_name="nibble_norm_route_experts",
    op_func=_norm_route_experts,
    fake_impl=_norm_route_experts_fake,
)

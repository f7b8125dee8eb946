"""Fuses a router of experts, and the norm in front of it, when a model is loaded.

The gate's product, the scores and the choice are nibble::route_experts. Its result takes the place
of the logits in vLLM's runner, so that vLLM's capture of routed experts, shared experts and
reductions stay as they are. Objects keep their attributes and names: their class becomes a
subclass.

With the norm comes the factor of a shared expert, sigmoid of its gate's product. The routed
experts' kernel takes it with the expert (shared_expert.py). Where it does not, the block multiplies
by it where it adds the shared expert's output, which torch compiles into one kernel with the next
norm.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from nibble_kernels.router import (
    CHUNK,
    MAX_CHOSEN,
    MAX_COLUMNS,
    MAX_EXPERTS,
    norm_route_experts,
    route_experts,
    weights_and_ids,
)
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.router import fused_topk_router
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.models.qwen2_moe import Qwen2MoeMLP
from vllm.utils.torch_utils import direct_register_custom_op

from nibble.engine.plugin.cuda import GpuExperts
from nibble.engine.plugin.layers import name_of
from nibble.engine.plugin.loaded_models import Unsuitable, after_loading
from nibble.engine.plugin.require import required, required_of_instances
from nibble.engine.plugin.shared_expert import join, joined

logger = init_logger(f"vllm.{__name__}")  # vLLM shows messages of loggers below this name

# Exactly these classes: a subclass may choose otherwise.
ROUTERS: list[type[BaseRouter]] = [FusedTopKRouter, FusedTopKBiasRouter]
# Attributes of routers whose choice is more than the highest scores, and their values without it.
OTHER_CHOICES = {
    "use_grouped_topk": False,
    "custom_routing_function": None,
    "_hash_indices_table": None,
    "bias_vl": None,
    "num_fused_shared_experts": 0,
    "eplb_state": None,
}
# Classes of vLLM 0.32. A block's forward is experts(x, x); a layer's gives the norm's results to
# the block and to the next layer unchanged.
BLOCKS = frozenset("Qwen3MoeSparseMoeBlock Qwen3NextSparseMoeBlock".split())
LAYERS = frozenset("Qwen3MoeDecoderLayer Qwen3NextDecoderLayer Qwen3_5DecoderLayer".split())
SHARED = ("scales_shared", "joins_shared")  # attributes of a fused block

# What vLLM computes and why -> the names of the layers.
Reasons = dict[tuple[str, str], list[str]]


class Route(NamedTuple):
    """What the kernel needs to know of a router beside x and the gate's weight."""

    topk: int
    sigmoid: bool
    renormalize: bool
    bias: Tensor | None
    scale: float
    round_logits: bool


def follow_loading() -> None:
    """Fuse in every model that vLLM loads in this process.

    Raises VllmMismatch.
    """
    required_of_instances(VllmConfig, "lora_config")
    parts = ("gate", "router", "routed_experts", "_fse_fuse_gate", "routed_input_transform")
    required_of_instances(MoERunner, *parts, "moe_config")
    shared = ("_shared_experts", "_forward_entry", "routed_output_transform")
    required_of_instances(MoERunner, *shared, "routed_scaling_factor")
    required(MoERunner, "_encode_layer_name", "self")
    required(MoERunner, "_select_forward", "self")
    required_of_instances(SharedExperts, "_layer")
    required_of_instances(Qwen2MoeMLP, "expert_gate")
    required_of_instances(FusedMoEConfig, "moe_parallel_config", "hidden_dim")
    sizes = ("dp_size", "ep_size", "pcp_size", "sp_size", "tp_size")
    required_of_instances(FusedMoEParallelConfig, *sizes)
    required_of_instances(FusedTopKRouter, "top_k", "scoring_func", "renormalize")
    required_of_instances(FusedTopKBiasRouter, "e_score_correction_bias", "routed_scaling_factor")
    compute = ("self", "hidden_states", "router_logits", "indices_type")
    required(BaseRouter, "_compute_routing", *compute)
    required(fused_topk_router, "_get_padding_mask", "num_tokens")
    required_of_instances(RMSNorm, "variance_epsilon", "variance_size_override", "has_weight")
    required_of_instances(GemmaRMSNorm, "variance_epsilon")

    def fuse(model: nn.Module) -> None:
        config = get_current_vllm_config_or_none()
        if config is not None and config.lora_config is None:
            fuse_routers(model)

    after_loading(fuse)


def fuse_routers(model: nn.Module) -> None:
    """Fuse the router of each layer of experts that nibble's GPU kernels compute, where its choice
    is the kernel's, and the norm in front of it where the layer's class is known.
    """
    reasons: Reasons = {}
    fused: dict[int, Route] = {}  # by the runner's id
    for runner in _runners(model):
        if (expert := joined(runner)) is not None:
            expert.follow()
        if hasattr(runner.router, "fused_gate"):
            continue  # weights were loaded again
        try:
            fused[id(runner)] = fuse_router(runner)
        except Unsuitable as reason:
            _remember(reasons, "router of experts", reason, runner)
    blocks = [block for layer in list(model.modules()) if (block := _fuse_norm(layer, fused))]
    for block in blocks:
        if block.scales_shared:
            try:
                join(block.shared_expert, block.experts)
                block.joins_shared = True
            except Unsuitable as reason:
                _remember(reasons, "shared expert", reason, block.experts)
    if fused:
        text = (
            "nibble's router of experts: %d layers, %d with their norm, %d with a shared gate, %d"
            " with the shared expert among the routed ones"
        )
        counts = [sum(getattr(block, name) for block in blocks) for name in SHARED]
        logger.info(text, len(fused), len(blocks), *counts)
    for (what, why), names in reasons.items():
        logger.info("vLLM's %s: %d layers (%s): %s", what, len(names), names[0], why)


def _remember(reasons: Reasons, what: str, why: Unsuitable, runner: Any) -> None:
    reasons.setdefault((what, str(why)), []).append(name_of(runner))


def _runners(model: nn.Module) -> Iterator[Any]:
    for module in list(model.modules()):
        if isinstance(module, MoERunner):
            runner: Any = module
            if isinstance(runner.routed_experts.quant_method, GpuExperts):
                yield runner


def fuse_router(runner: Any) -> Route:
    """Raises Unsuitable and changes nothing if the kernel does not choose as the router does."""
    route = route_of(runner)
    router, gate = runner.router, runner.gate
    router.__class__ = _router_class(type(router))
    router.fused_gate = runner.gate = FusedGate(gate, route)
    return route


def route_of(runner: Any) -> Route:
    """Raises Unsuitable."""
    router, gate = runner.router, runner.gate
    sizes = runner.moe_config.moe_parallel_config
    _check_gate(gate, runner)
    if max(sizes.dp_size, sizes.ep_size, sizes.pcp_size, sizes.sp_size) > 1:
        raise Unsuitable("experts or tokens are divided among ranks")
    if type(router) not in ROUTERS:
        raise Unsuitable(f"the router is a {type(router).__name__}")
    for name, value in OTHER_CHOICES.items():
        if getattr(router, name, value) != value:
            raise Unsuitable(f"the router has {name.strip('_')}")
    bias = getattr(router, "e_score_correction_bias", None)
    if bias is not None and bias.dtype != torch.float32:
        raise Unsuitable(f"the router's bias is {bias.dtype}")
    if router.scoring_func not in ("softmax", "sigmoid"):
        raise Unsuitable(f"scores are {router.scoring_func}")
    if router.top_k > MAX_CHOSEN:
        raise Unsuitable(f"a token has {router.top_k} experts")
    dtype = getattr(gate, "out_dtype", None)
    return Route(
        router.top_k,
        router.scoring_func == "sigmoid",
        router.renormalize,
        bias,
        getattr(router, "routed_scaling_factor", 1.0),
        dtype in (None, torch.bfloat16),
    )


def _check_gate(gate: Any, runner: Any) -> None:
    if type(gate) not in (GateLinear, ReplicatedLinear) or runner._fse_fuse_gate:
        raise Unsuitable("the gate is computed elsewhere")
    if not isinstance(gate.quant_method, UnquantizedLinearMethod) or gate.bias is not None:
        raise Unsuitable("the gate is quantized or has a bias")
    if gate.weight.dim() != 2 or gate.weight.dtype != torch.bfloat16:
        raise Unsuitable(f"the gate is {gate.weight.dtype}, or packed")
    experts, columns = gate.weight.shape
    if experts > MAX_EXPERTS or columns > MAX_COLUMNS or columns % CHUNK:
        raise Unsuitable(f"the gate is {experts} by {columns}")
    if runner.routed_input_transform is not None or runner.moe_config.hidden_dim != columns:
        raise Unsuitable("the gate's input is not the experts'")


@functools.cache
def _router_class(base: Any) -> type:
    """Takes the kernel's result in place of logits. vLLM's checks of a start still give logits."""

    def compute_routing(
        self: Any, hidden_states: Tensor, router_logits: Tensor, *rest: Any, **more: Any
    ) -> tuple[Tensor, Tensor]:
        if router_logits.dim() == 3:
            return weights_and_ids(router_logits)
        return base._compute_routing(self, hidden_states, router_logits, *rest, **more)

    return type(f"Nibble{base.__name__}", (base,), {"_compute_routing": compute_routing})


def _padding(tokens: int) -> Tensor | None:
    """Tokens that fill up a CUDA graph's batch: they get no experts, as in vLLM's top-k."""
    return fused_topk_router._get_padding_mask(tokens)


class FusedGate(nn.Module):
    """A gate that chooses the experts. Returns (the operator's result, None)."""

    def __init__(self, gate: Any, route: Route) -> None:
        super().__init__()
        self.gate, self.route = gate, route

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Inside vLLM's operator for experts, so that the number of tokens is known."""
        topk, sigmoid, renormalize, bias, scale, round_logits = self.route
        choices = route_experts(
            x,
            self.gate.weight,
            topk,
            sigmoid=sigmoid,
            renormalize=renormalize,
            bias=bias,
            scale=scale,
            round_logits=round_logits,
            padding=_padding(len(x)),
        )
        return choices, None


def _fuse_norm(layer: Any, fused: dict[int, Route]) -> Any:
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
        padding=_padding(len(x)),
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

"""A router of experts as one kernel: the gate's product, the scores and the choice.

The result takes the place of the logits in vLLM's runner, so that vLLM's capture of routed experts,
shared experts and reductions stay as they are. Objects keep their attributes and names: their class
becomes a subclass.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from nibble_kernels.router import (
    CHUNK,
    MAX_CHOSEN,
    MAX_COLUMNS,
    MAX_EXPERTS,
    route_experts,
    weights_and_ids,
)
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.router import fused_topk_router
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

from nibble.engine.plugin.loaded_models import Unsuitable

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


class Route(NamedTuple):
    """What the kernel needs to know of a router beside x and the gate's weight."""

    topk: int
    sigmoid: bool
    renormalize: bool
    bias: Tensor | None
    scale: float
    round_logits: bool


def fuse_gate(runner: Any) -> Route:
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


def padding(tokens: int) -> Tensor | None:
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
            padding=padding(len(x)),
        )
        return choices, None

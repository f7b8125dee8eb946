"""Fuses routers of experts, and the norms in front of them, when a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.router import fused_topk_router
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.models.qwen2_moe import Qwen2MoeMLP

from nibble.engine.plugin.cuda import GpuExperts
from nibble.engine.plugin.layers import name_of
from nibble.engine.plugin.loaded_models import Unsuitable, after_loading
from nibble.engine.plugin.options import current_options
from nibble.engine.plugin.require import required, required_of_instances
from nibble.engine.plugin.router.gate import Route, fuse_gate
from nibble.engine.plugin.router.norm import fuse_norm
from nibble.engine.plugin.shared_expert import join, joined

logger = init_logger(f"vllm.{__name__}")  # vLLM shows messages of loggers below this name

SHARED = ("scales_shared", "joins_shared")  # attributes of a fused block

# What vLLM computes and why -> the names of the layers.
Reasons = dict[tuple[str, str], list[str]]


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
            fused[id(runner)] = fuse_gate(runner)
        except Unsuitable as reason:
            _remember(reasons, "router of experts", reason, runner)
    blocks = [block for layer in list(model.modules()) if (block := fuse_norm(layer, fused))]
    for block in blocks:
        if block.scales_shared and current_options().shared_expert == "on":
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

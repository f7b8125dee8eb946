"""What our GPU kernel does for a layer's neighbour: silu · mul after gate and up. Arranged when
a model is loaded.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.model_loader import base_loader

from nibble.engine.plugin.cuda import NibbleNvFp4LinearKernel
from nibble.engine.plugin.layers import kernel_of
from nibble.engine.plugin.require import replace, required, required_of_instances

# Whose forward is down_proj(act_fn(gate_up_proj(x))), with nothing in between.
PLAIN_MLPS = frozenset(
    (
        "DeepseekV2MLP",
        "Glm4MoeMLP",
        "LlamaMLP",
        "MistralMLP",
        "Qwen2MLP",
        "Qwen2MoeMLP",
        "Qwen3MoeMLP",
    )
)


def follow_loading() -> None:
    """Fuse in every model that vLLM loads in this process (vllm 0.32 base_loader.py:109)."""
    name = "process_weights_after_loading"  # which that module imports for itself
    names = ("model", "model_config", "target_device")
    process = required(base_loader, name, *names)
    required_of_instances(VllmConfig, "lora_config")

    @functools.wraps(process)
    def process_and_fuse(model: nn.Module, *rest: Any) -> None:
        process(model, *rest)
        config = get_current_vllm_config_or_none()
        has_adapters = config is not None and config.lora_config is not None
        if not has_adapters:  # adapters add to gate and up before silu · mul
            fuse_silu_mul(model)

    replace(base_loader, name, process_and_fuse)


def fuse_silu_mul(model: nn.Module) -> None:
    """Let gate and up of plain MLPs come with silu · mul."""
    for mlp in list(model.modules()):
        if type(mlp).__name__ in PLAIN_MLPS and type(mlp.act_fn) is SiluAndMul:
            kernel = our_kernel_of(mlp.gate_up_proj)
            if kernel is not None:
                mlp.gate_up_proj = GateUpSiluMul(mlp.gate_up_proj, kernel)
                mlp.act_fn = nn.Identity()


def our_kernel_of(layer: Any) -> NibbleNvFp4LinearKernel | None:
    """Our kernel where it computes a layer."""
    kernel = kernel_of(layer)
    return kernel if isinstance(kernel, NibbleNvFp4LinearKernel) else None


class GateUpSiluMul(nn.Module):
    """A fused gate_up_proj whose output, [..., N/2], has been through silu · mul; returns what
    vLLM's layer does.
    """

    def __init__(self, layer: Any, kernel: NibbleNvFp4LinearKernel) -> None:
        super().__init__()
        self.layer, self._kernel = layer, kernel

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """x [..., K]."""
        layer: Any = self.layer
        return self._kernel.apply_weights(layer, x, layer.bias, silu_mul=True), None

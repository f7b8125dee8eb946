"""Fuses silu · mul into nibble's GPU kernel for gate and up, when a model is loaded."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.model_executor.layers.activation import SiluAndMul

from nibble.engine.plugin.cuda import NibbleNvFp4LinearKernel
from nibble.engine.plugin.layers import kernel_of
from nibble.engine.plugin.loaded_models import after_loading
from nibble.engine.plugin.require import required_of_instances

# Classes of vLLM 0.32 whose forward is exactly down_proj(act_fn(gate_up_proj(x))).
PLAIN_MLPS = frozenset(
    "DeepseekV2MLP Glm4MoeMLP LlamaMLP MistralMLP Qwen2MLP Qwen2MoeMLP Qwen3MoeMLP".split()
)


def follow_loading() -> None:
    """Fuse in every model that vLLM loads in this process.

    Raises VllmMismatch.
    """
    required_of_instances(VllmConfig, "lora_config")

    def fuse(model: nn.Module) -> None:
        config = get_current_vllm_config_or_none()
        has_adapters = config is not None and config.lora_config is not None
        if not has_adapters:  # LoRA adapters add to gate and up before silu · mul
            fuse_silu_mul(model)

    after_loading(fuse)


def fuse_silu_mul(model: nn.Module) -> None:
    """Fuse silu · mul into gate and up of each plain MLP that nibble's kernel computes."""
    for mlp in list(model.modules()):
        if type(mlp).__name__ in PLAIN_MLPS and type(mlp.act_fn) is SiluAndMul:
            kernel = nibble_kernel_of(mlp.gate_up_proj)
            if kernel is not None:
                mlp.gate_up_proj = GateUpSiluMul(mlp.gate_up_proj, kernel)
                mlp.act_fn = nn.Identity()


def nibble_kernel_of(layer: Any) -> NibbleNvFp4LinearKernel | None:
    """The layer's kernel, if it is nibble's."""
    kernel = kernel_of(layer)
    return kernel if isinstance(kernel, NibbleNvFp4LinearKernel) else None


class GateUpSiluMul(nn.Module):
    """A gate_up_proj with silu · mul. Returns (output, None), as vLLM's layer does."""

    def __init__(self, layer: Any, kernel: NibbleNvFp4LinearKernel) -> None:
        super().__init__()
        self.layer, self.kernel = layer, kernel

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """x [..., K] to [..., N/2]."""
        layer: Any = self.layer
        return self.kernel.apply_weights(layer, x, layer.bias, silu_mul=True), None

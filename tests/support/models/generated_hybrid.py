"""Qwen3-Next checkpoints of any size with random weights: linear attention, full attention in every
fourth layer, and experts beside a shared one. Experts are NVFP4, the other layers BF16, or linear
attention FP8 as in published checkpoints of ModelOpt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tests.support.models.generated_nvfp4 import Shape

FULL_ATTENTION_EVERY, CONVOLUTION = 4, 4
IN_FP8 = ("linear_attn.in_proj_qkvz", "linear_attn.out_proj")
# vLLM adds one to their weights (vllm 0.32 models/qwen3_next.py:32).
ADDED_TO_ONE = ("input_layernorm", "post_attention_layernorm", "model.norm", "q_norm", "k_norm")


@dataclass(frozen=True)
class HybridShape(Shape):
    """`intermediate` is an expert's; the attention has `head_dim`."""

    linear_heads: int = 32  # of values; keys have half as many
    linear_head_dim: int = 128
    has_fp8: bool = False  # linear attention's products, but for the small one
    shared_factor: int = 1  # the shared expert's size in experts
    # For ModelOpt's patterns and for regular expressions; fused layers have other names.
    unquantized: ClassVar = ("mlp.gate", "mlp.shared_expert_gate", "self_attn.*", "linear_attn.*")

    @property
    def layer_types(self) -> list[str]:
        return [
            "linear_attention" if (layer + 1) % FULL_ATTENTION_EVERY else "full_attention"
            for layer in range(self.layers)
        ]

    def config(self) -> dict[str, Any]:
        """config.json without quantization."""
        return super().config() | {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "layer_types": self.layer_types,
            "full_attention_interval": FULL_ATTENTION_EVERY,
            "partial_rotary_factor": 0.25,
            "shared_expert_intermediate_size": self.intermediate * self.shared_factor,
            "linear_conv_kernel_dim": CONVOLUTION,
            "linear_num_key_heads": self.linear_heads // 2,
            "linear_num_value_heads": self.linear_heads,
            "linear_key_head_dim": self.linear_head_dim,
            "linear_value_head_dim": self.linear_head_dim,
        }

    def linears(self) -> dict[str, tuple[int, int]]:
        """Name -> rows and columns of what is quantized: experts."""
        owners = {f"experts.{expert}": self.intermediate for expert in range(self.experts)}
        owners["shared_expert"] = self.intermediate * self.shared_factor
        return {
            f"model.layers.{layer}.mlp.{owner}.{name}_proj": (
                (self.hidden, size) if name == "down" else (size, self.hidden)
            )
            for layer in range(self.layers)
            for owner, size in owners.items()
            for name in ("gate", "up", "down")
        }

    def fp8_linears(self) -> dict[str, tuple[int, int]]:
        """Linear attention's products with `has_fp8`."""
        if not self.has_fp8:
            return {}
        sizes = self._linear_attention()
        return {
            f"model.layers.{layer}.{name}": (sizes[f"{name}.weight"][0], sizes[f"{name}.weight"][1])
            for layer, kind in enumerate(self.layer_types)
            if kind == "linear_attention"
            for name in IN_FP8
        }

    def norm(self, name: str) -> float:
        """Most norms store what is added to one; linear attention's does not."""
        return 0.0 if name.removesuffix(".weight").endswith(ADDED_TO_ONE) else 1.0

    def others(self) -> dict[str, list[int]]:
        """Name -> shape of what stays in BF16."""
        hidden = self.hidden
        found = {
            "model.embed_tokens.weight": [self.vocabulary, hidden],
            "model.norm.weight": [hidden],
            "lm_head.weight": [self.vocabulary, hidden],
        }
        for layer, kind in enumerate(self.layer_types):
            parts = {
                "input_layernorm.weight": [hidden],
                "post_attention_layernorm.weight": [hidden],
                "mlp.gate.weight": [self.experts, hidden],
                "mlp.shared_expert_gate.weight": [1, hidden],
            } | (self._linear_attention() if kind == "linear_attention" else self._attention())
            found |= {f"model.layers.{layer}.{name}": size for name, size in parts.items()}
        in_fp8 = {f"{name}.weight" for name in self.fp8_linears()}
        return {name: size for name, size in found.items() if name not in in_fp8}

    def _linear_attention(self) -> dict[str, list[int]]:
        values, keys = self.linear_heads * self.linear_head_dim, self.linear_heads // 2
        keys *= self.linear_head_dim
        parts = {
            "dt_bias": [self.linear_heads],
            "A_log": [self.linear_heads],
            "conv1d.weight": [2 * keys + values, 1, CONVOLUTION],
            "in_proj_qkvz.weight": [2 * keys + 2 * values, self.hidden],
            "in_proj_ba.weight": [2 * self.linear_heads, self.hidden],
            "norm.weight": [self.linear_head_dim],
            "out_proj.weight": [self.hidden, values],
        }
        return {f"linear_attn.{name}": size for name, size in parts.items()}

    def _attention(self) -> dict[str, list[int]]:
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        parts = {
            "q_proj.weight": [2 * query, self.hidden],  # and a gate
            "k_proj.weight": [key, self.hidden],
            "v_proj.weight": [key, self.hidden],
            "o_proj.weight": [self.hidden, query],
            "q_norm.weight": [self.head_dim],
            "k_norm.weight": [self.head_dim],
        }
        return {f"self_attn.{name}": size for name, size in parts.items()}


# Each token has all experts, so that no rounding changes one.
SMALL = HybridShape(
    hidden=256,
    intermediate=128,
    layers=FULL_ATTENTION_EVERY,
    heads=4,
    kv_heads=2,
    head_dim=64,
    vocabulary=256,
    experts=4,
    chosen=4,
    linear_heads=4,
)

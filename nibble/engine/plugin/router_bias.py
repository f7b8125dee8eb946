"""Loads a router's correction bias that a checkpoint stores beside its experts (Laguna).

vLLM 0.32 passes such a tensor to RoutedExperts.load_weights, which handles only weights of experts
and drops it (fused_moe/routed_experts.py:981). The router then adds zeros and selects other
experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from nibble.engine.plugin.require import replace, required, required_of_instances

NAME = "e_score_correction_bias"

Weights = Iterable[tuple[str, Tensor]]


def load_router_biases() -> None:
    """Replace MoERunner.load_weights (vllm 0.32 fused_moe/runner/moe_runner.py:301)."""
    load = required(MoERunner, "load_weights", "self", "weights")
    required_of_instances(MoERunner, "routed_experts")
    required_of_instances(RoutedExperts, NAME)

    def load_with_bias(self: Any, weights: Weights) -> Iterable[str]:
        bias, loaded = getattr(self.routed_experts, NAME, None), list[str]()

        def without_bias() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name == NAME and bias is not None:
                    default_weight_loader(bias, tensor)
                    loaded.append(f"routed_experts.{NAME}")
                else:
                    yield name, tensor

        yield from load(self, without_bias())
        yield from loaded

    replace(MoERunner, "load_weights", load_with_bias)

"""Adds a router's correction bias on vLLM's CPU platform (Ernie 4.5 and Laguna).

vLLM 0.32's CPURouter adds the bias only for experts in groups. Without groups, softmax scores
ignore it, and sigmoid scores end in an AssertionError (fused_moe/router/cpu_router.py:249). On GPUs
FusedTopKBiasRouter adds it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.fused_moe.router import cpu_router

from nibble.engine.plugin.require import replace, required, required_of_instances

SCORES = ("softmax", "sigmoid")
# Parameters of vLLM's _grouped_topk, and attributes of its CPURouter.
GROUPED = tuple(
    "gating_output topk renormalize num_expert_group topk_group scoring_func routed_scaling_factor"
    " e_score_correction_bias".split()
)
ATTRIBUTES = tuple(
    "use_grouped_topk custom_routing_function e_score_correction_bias scoring_func top_k"
    " renormalize routed_scaling_factor".split()
)


def add_biases() -> None:
    """Replace CPURouter._compute_routing: experts without groups become one group.

    Raises VllmMismatch.
    """
    router = cpu_router.CPURouter
    compute = required(router, "_compute_routing")
    required_of_instances(router, *ATTRIBUTES)
    required(cpu_router, "_grouped_topk", *GROUPED)

    def compute_with_bias(
        self: Any, hidden_states: Tensor, router_logits: Tensor, *rest: Any, **more: Any
    ) -> Any:
        is_plain = not self.use_grouped_topk and self.custom_routing_function is None
        needs = self.e_score_correction_bias is not None or self.scoring_func == "sigmoid"
        if not (is_plain and needs and self.scoring_func in SCORES):
            return compute(self, hidden_states, router_logits, *rest, **more)
        return cpu_router._grouped_topk(
            router_logits,
            self.top_k,
            self.renormalize,
            1,
            1,
            self.scoring_func,
            self.routed_scaling_factor,
            self.e_score_correction_bias,
        )

    replace(router, "_compute_routing", compute_with_bias)

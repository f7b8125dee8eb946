"""What a plan needs of every node. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nibble.plan import Plan


def least_memory_bytes(plan: Plan) -> int:
    """What each node needs: weights, engine and the smallest KV cache; 0 where the weights are not known."""
    budget = plan.budget
    if budget.weights_bytes is None:
        return 0
    return budget.weights_bytes + budget.overhead_bytes + budget.least_kv_bytes

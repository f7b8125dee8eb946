"""What a plan needs of every node. Pure but for the look whether a draft is a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nibble.plan.plan import Plan


def model_folders(plan: Plan) -> list[str]:
    """The folders that every node of a Ray cluster loads from: the model's and its draft's."""
    draft = plan.args.get("--speculative-config")
    named = draft.value.get("model") if draft and isinstance(draft.value, Mapping) else None
    return list(dict.fromkeys([plan.model, *([named] if named and Path(named).is_dir() else [])]))


def least_memory_bytes(plan: Plan) -> int:
    """What each node needs: weights, engine and the smallest KV cache; 0 where the weights are
    not known.
    """
    budget = plan.budget
    if budget.weights_bytes is None:
        return 0
    return budget.weights_bytes + budget.overhead_bytes + budget.least_kv_bytes

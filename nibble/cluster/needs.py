"""What a plan needs of every node. Pure, except that it checks whether a draft is a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nibble.plan.plan import Plan


def model_folders(plan: Plan) -> list[str]:
    """The folders that every node of a Ray cluster loads: the model's, and the draft's if there is
    one.
    """
    draft = plan.args.get("--speculative-config")
    draft_model = draft.value.get("model") if draft and isinstance(draft.value, Mapping) else None
    folders = [plan.model]
    if draft_model and draft_model != plan.model and Path(draft_model).is_dir():
        folders.append(draft_model)
    return folders


def least_memory_bytes(plan: Plan) -> int:
    """Bytes that each node needs: weights, engine and the smallest KV cache; 0 if the weights' size
    is unknown.
    """
    budget = plan.budget
    if budget.weights_bytes is None:
        return 0
    return budget.weights_bytes + budget.overhead_bytes + budget.least_kv_bytes

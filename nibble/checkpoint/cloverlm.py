"""Recognises CloverLM by its config."""

from __future__ import annotations

from nibble.checkpoint import Checkpoint
from nibble.engine.contract import CLOVERLM_MODEL_TYPE


def is_cloverlm(checkpoint: Checkpoint | None) -> bool:
    return checkpoint is not None and checkpoint.model_type == CLOVERLM_MODEL_TYPE

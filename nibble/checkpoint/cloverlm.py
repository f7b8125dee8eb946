"""Recognises CloverLM by its config."""

from __future__ import annotations

from nibble.checkpoint import Checkpoint

MODEL_TYPE = "cloverlm"


def is_cloverlm(checkpoint: Checkpoint | None) -> bool:
    return checkpoint is not None and checkpoint.model_type == MODEL_TYPE

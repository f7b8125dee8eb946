"""Finds damaged scales that would make an NVFP4 checkpoint compute wrongly."""

from __future__ import annotations

import time

from nibble.checkpoint import Checkpoint
from nibble.checkpoint.cloverlm import is_cloverlm
from nibble.checkpoint.plain_values import check_plain_values
from nibble.checkpoint.scale_layout import check_layout
from nibble.checkpoint.scale_values import check_values
from nibble.checkpoint.weights import kind_of
from nibble.machine.disk import gib


def check_scales(checkpoint: Checkpoint, with_draft: bool) -> list[str]:
    """Check scales and small unquantized tensors; returns how much was read and how long it took.

    Raises MODEL or CONFIG, naming the first wrong tensor.
    """
    weights = [weight for weight in checkpoint.nvfp4 if with_draft or not weight.is_draft]
    if checkpoint.path is None or not weights:
        return []
    start = time.monotonic()
    values = check_values(checkpoint.path, weights)
    count = checkpoint.num_layers
    read = [
        one
        for one in checkpoint.tensors.values()
        if with_draft or kind_of(one.name, count) != "draft"
    ]
    for problem in (*values.problems, *check_plain_values(checkpoint.path, read, count)):
        raise problem.error(checkpoint.where)
    if problem := check_layout(checkpoint.path, weights, is_cloverlm(checkpoint)).problem:
        raise problem.error(checkpoint.where)
    seconds = time.monotonic() - start
    return [
        f"checked {values.tensors} NVFP4 scale tensors ({gib(values.nbytes)}) in {seconds:.1f} s"
    ]

"""Which GPUs each of several models gets. Pure.

The GPUs are divided into equal groups, as large as the model with most ranks needs. Models of one
group share its memory; groups have nothing to do with one another.
"""

from __future__ import annotations

from collections.abc import Sequence

from nibble.serve.fleet.budgets import Need


def group_size(ranks: Sequence[int], gpus: int) -> int:
    """GPUs of a group; all where only one group is possible."""
    size = max(ranks)
    return size if gpus // size > 1 else max(gpus, 1)


def place(needs: Sequence[Need], groups: int) -> tuple[int, ...]:
    """The group of each model: models that stay before others, the largest first, each to the
    group that has taken least.
    """
    taken_bytes = [0] * groups
    found: dict[str, int] = {}
    for need in sorted(needs, key=lambda one: (not one.stays, -one.least_bytes)):
        group = min(range(groups), key=lambda one: (taken_bytes[one], one))
        taken_bytes[group] += need.least_bytes
        found[need.model] = group
    return tuple(found[need.model] for need in needs)

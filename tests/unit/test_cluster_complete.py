"""What is missing of a cluster, and how often that is said."""

from __future__ import annotations

from typing import Any

import pytest

from nibble.cluster.complete import Expected, Reminder, missing_of


def node(name: str, gpus: int = 1, age_s: float = 0.0, rank: int | None = None) -> dict[str, Any]:
    return {"name": name, "address": name, "gpus": gpus, "age_s": age_s, "rank": rank, "busy": 0}


def test_what_stays_is_said_once_and_each_minute_and_what_changes_at_once() -> None:
    reminder = Reminder()
    waiting = [f"not yet: node b: 0.{second} GiB of memory are available" for second in range(130)]
    assert [at for at, text in enumerate(waiting) if reminder.is_due(text, at)] == [0, 60, 120]
    assert reminder.is_due("not yet: node b: it cannot reach a:6379", 130)
    assert not reminder.is_due("not yet: node b: it cannot reach a:6379", 131)


@pytest.mark.parametrize(
    ("nodes", "has_ray", "expected", "words"),
    [
        ([node("a")], True, Expected(None, None), "only a answers"),
        ([], True, Expected(None, None), "no node has joined"),
        ([node("a"), node("b")], True, Expected(None, None), None),
        (
            [node("a"), node("b"), node("c", age_s=12.0)],
            True,
            Expected(None, None),
            "node c has not answered",
        ),
        ([node("a"), node("b"), node("c", age_s=12.0)], True, Expected(2, None), None),
        (
            [node("a"), node("b")],
            True,
            Expected(3, None),
            "the plan needs 3 nodes, but only a, b answer",
        ),
        ([node("a")], True, Expected(1, None), None),
        ([node("a")], True, Expected(None, 2), "the plan needs 2 GPUs, but the nodes offer 1"),
        ([node("a"), node("b", gpus=0)], True, Expected(2, 2), "the plan needs 2 GPUs"),
        ([node("a", rank=0), node("c", rank=2)], False, Expected(3, None), "the node with rank 1"),
        ([node("a", rank=0), node("b", rank=1)], False, Expected(2, None), None),
    ],
)
def test_a_check_misses_what_a_start_would(
    nodes: list[dict[str, Any]], has_ray: bool, expected: Expected, words: str | None
) -> None:
    missing = missing_of(nodes, has_ray, expected)
    assert (missing is None) if words is None else missing is not None and words in missing.what

"""A head's copy on the CPU: its memory in the plan, and the bytes of a decode step."""

from __future__ import annotations

from pathlib import Path

import pytest

from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.plan import Plan
from tests.support.models.generated_nvfp4 import Shape, write_checkpoint

SHAPE = Shape()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("head") / "model", SHAPE, "modelopt")


def planned(model: Path, *words: str, target: str = "cpu") -> Plan:
    return plan_for(read_wishes([str(model), "--target", target, *words], {}))


def copy_bytes(plan: Plan) -> int:
    """What the plan's weights have beside the checkpoint's."""
    checkpoint = plan.checkpoint
    assert checkpoint is not None
    assert checkpoint.weights is not None
    assert plan.budget.weights_bytes is not None
    weights = checkpoint.weights
    return plan.budget.weights_bytes - min(weights.total_bytes, 2 * weights.parameters)


def test_the_copy_counts_as_weights_and_fewer_bytes_are_read(model: Path) -> None:
    plan = planned(model)
    assert plan.checkpoint is not None
    assert plan.checkpoint.weights is not None
    vocabulary, hidden = plan.checkpoint.vocab_size, plan.checkpoint.hidden_size
    assert vocabulary is not None
    assert hidden is not None
    assert copy_bytes(plan) == vocabulary * (hidden + 12)
    step, all_bytes = plan.bound.bytes_per_step, plan.checkpoint.weights.decode_bytes_per_step
    assert step is not None
    assert all_bytes is not None
    assert step == all_bytes - vocabulary * (hidden - 12)


def test_where_steps_are_not_nibbles_there_is_no_copy(model: Path, tmp_path: Path) -> None:
    drafts = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}')
    for words in (("--tensor-parallel-size", "2"), ("--enable-lora",), drafts):
        plan = planned(model, *words)
        assert plan.checkpoint is not None
        assert plan.checkpoint.weights is not None
        assert plan.bound.bytes_per_step == plan.checkpoint.weights.decode_bytes_per_step
    assert copy_bytes(planned(model, target="hopper")) == 0
    experts = write_checkpoint(tmp_path / "experts", Shape(experts=4, chosen=2), "modelopt")
    assert copy_bytes(planned(experts)) == 0

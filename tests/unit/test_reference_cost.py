"""Which references a start makes by itself: by what they cost on this machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nibble.checkpoint import Checkpoint, read_checkpoint
from nibble.machine.hardware import Hardware, detect
from nibble.machine.paths import demo_models
from nibble.machine.targets import load_target
from nibble.plan.reference import activations_served
from nibble.reference.cost import AUTO_SECONDS, affordable, estimate

GIB = 1 << 30


@pytest.fixture(scope="module")
def demo() -> Checkpoint:
    return read_checkpoint(str(demo_models()["nibble-demo-nvfp4"]))


def machine(cores: int, gib: float) -> Hardware:
    return replace(detect(), cpu_cores=cores, memory_available_bytes=int(gib * GIB))


def larger(demo: Checkpoint, parameters: int, layers: int = 64) -> Checkpoint:
    assert demo.weights is not None
    weights = replace(
        demo.weights,
        parameters=parameters,
        active_parameters=parameters,
        total_bytes=parameters * 9 // 16,
    )
    return replace(demo, weights=weights, num_layers=layers)


def test_a_small_model_is_computed_whole(demo: Checkpoint) -> None:
    cost, why = affordable(demo, machine(2, 20))
    assert cost is not None and cost.keeps and cost.answer_tokens == 16
    assert why.startswith("about ")


def test_a_model_that_memory_does_not_hold_gets_the_first_token_alone(demo: Checkpoint) -> None:
    cost, _ = affordable(larger(demo, 8_000_000_000), machine(32, 40))
    assert cost is not None and not cost.keeps and cost.answer_tokens == 1
    assert cost.seconds <= AUTO_SECONDS and cost.peak_bytes < 20 * GIB


def test_an_8b_model_on_8_cores_gets_the_first_token_and_no_16_that_would_take_minutes(
    demo: Checkpoint,
) -> None:
    """16 tokens did not end within 180 s beside a load on 16 cores of an H200 machine."""
    model, cores = larger(demo, 8_200_000_000, 36), machine(8, 120)
    whole = estimate(model, cores)
    assert whole is not None and whole.seconds > 150
    cost, _ = affordable(model, cores)
    assert cost is not None and (cost.answer_tokens, cost.keeps) == (1, False) and cost.seconds < 60
    assert cost.peak_bytes < 8 * GIB


def test_what_takes_too_long_or_too_much_is_left_to_the_user(demo: Checkpoint) -> None:
    cost, why = affordable(larger(demo, 70_000_000_000), machine(2, 40))
    assert cost is None and why.startswith("it takes about ") and why.endswith("more than 60 s")
    cost, why = affordable(larger(demo, 1_000_000_000, 1), machine(64, 4))
    assert cost is None and why.endswith("GiB, more than half of the available memory")


def test_an_unknown_checkpoint_costs_an_unknown_time(demo: Checkpoint) -> None:
    assert estimate(replace(demo, weights=None), machine(2, 20)) is None


@pytest.mark.parametrize(("target", "kind"), [("cpu", "fp4"), ("gb10", "fp4"), ("hopper", "bf16")])
def test_activations_are_those_that_a_target_serves(
    demo: Checkpoint, target: str, kind: str
) -> None:
    assert activations_served(demo, load_target(target)) == kind
    weight_only = replace(demo, scheme=replace(demo.scheme, activations="bf16"))
    assert activations_served(weight_only, load_target(target)) == "bf16"
    asked = {"--additional-config": {"nibble": {"nvfp4_activations": "bf16"}}}
    assert activations_served(demo, load_target(target), asked) == "bf16"

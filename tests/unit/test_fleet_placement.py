"""Several models on several GPUs: groups, who goes where, and one budget for each group."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from nibble.cli import fleet
from nibble.machine.hardware import Hardware
from nibble.plan import gather
from nibble.serve.fleet.budgets import Need
from nibble.serve.fleet.placement import group_size, place
from nibble.settings.models import read_several
from tests.support.hardware import H200, HOPPER
from tests.unit.test_fleet_routing import Running, start, without_signals  # noqa: F401 - fixtures

GIB = 1 << 30


@pytest.mark.parametrize(
    ("ranks", "gpus", "size"),
    [([1, 1], 2, 1), ([1, 1], 8, 1), ([2, 1], 4, 2), ([2, 1], 3, 3), ([4, 1], 4, 4), ([1], 1, 1)],
)
def test_groups_are_as_large_as_the_model_with_most_ranks(
    ranks: list[int], gpus: int, size: int
) -> None:
    assert group_size(ranks, gpus) == size


def need(model: str, gib: int, stays: bool = False) -> Need:
    return Need(model, gib * GIB, 0, 0, stays)


def test_the_largest_models_are_spread_and_kept_ones_first() -> None:
    assert place([need("a", 10), need("b", 60), need("c", 50)], 2) == (1, 0, 1)
    assert place([need("a", 10), need("b", 60)], 1) == (0, 0)
    assert place([need("a", 10, True), need("b", 60), need("c", 5, True)], 2) == (0, 1, 1)


def plan(*words: str) -> dict:
    command = [sys.executable, "-m", "nibble", "plan", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


DEMOS = ("small=nibble-demo", "nibble-demo-nvfp4", "nibble-demo-moe-nvfp4", "--target", "hopper")


def test_each_plan_names_its_gpus_and_no_group_exceeds_its_memory() -> None:
    found = plan(*DEMOS, "--num-gpus", "2")
    gpus = {one["model"]: one["gpus"] for one in found["models"]}
    assert set(gpus.values()) == {"0", "1"}
    for one in set(gpus.values()):
        shares = [model["total_bytes"] for model in found["models"] if model["gpus"] == one]
        assert sum(shares) <= found["allowed_bytes"]


def test_models_of_two_gpus_take_pairs_and_one_gpu_is_as_before() -> None:
    pairs = plan(*DEMOS, "--num-gpus", "4", "--tensor-parallel-size", "2")
    assert {one["gpus"] for one in pairs["models"]} == {"0,1", "2,3"}
    for count in ("1", "2"):
        whole = plan(
            *DEMOS, "--num-gpus", count, *(["--tensor-parallel-size", "2"] * (count == "2"))
        )
        assert {one["gpus"] for one in whole["models"]} <= {None, "0,1"}


def test_each_model_is_planned_for_the_memory_of_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def detect(environ: Mapping[str, str]) -> Hardware:
        shown = environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        cards = (H200, replace(H200, index=1, memory_free_bytes=50 * GIB, uuid="GPU-1"))
        return replace(HOPPER, gpus=tuple(cards[int(index)] for index in shown))

    monkeypatch.setattr(gather, "detect", detect)
    several = read_several(["nibble-demo", "nibble-demo-nvfp4"], {}, ())
    assert several is not None
    asked = gather.read_wishes(several.words, {})
    planned = fleet.plan_all(asked, several, {}, tmp_path)
    assert [one.environ["CUDA_VISIBLE_DEVICES"] for one in planned] == ["0", "1"]
    assert [one.plan.hardware.gpus[0].uuid for one in planned] == ["GPU-0", "GPU-1"]
    assert (planned[1].plan.budget.allowed_bytes or 0) < 50 * GIB
    parts, allowed_bytes = fleet.shares(planned, asked)
    assert allowed_bytes < 50 * GIB and all(one.total_bytes <= allowed_bytes for one in parts)


def test_groups_load_and_unload_each_for_itself(start: Callable[..., Running]) -> None:  # noqa: F811
    running = start(sizes={"a": 6, "b": 6, "c": 6}, allowed=8, stays=False)
    running.fleet.members[2].group = 1
    for name in ("a", "c", "b", "c"):
        assert running.ask(name)[1]["by"] == name
    states = {one.entry.model: one.entry.state for one in running.fleet.members}
    assert states == {"a": "unloaded", "b": "ready", "c": "ready"}
    assert [one.name for one in running.engines] == ["a", "c", "b"]

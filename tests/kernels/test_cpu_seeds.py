"""A dropped token takes nothing from the random numbers of a request on the CPU platform."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

pytest.importorskip("vllm")
plugin = pytest.importorskip("nibble.engine.plugin.cpu_seeds")
pytestmark = pytest.mark.vllm


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's runner without a model, with nibble's change: rows 0 and 1 have seeds, row 0 drops
    its token.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def sample(self: Any, _logits: Any, _metadata: Any) -> dict[int, float]:
        found = self.input_batch.generators
        return {row: float(torch.rand(1, generator=made)) for row, made in found.items()}

    def bookkeep(self: Any) -> list[int]:  # what vllm 0.32 gpu_model_runner.py:3499 does
        for row in numpy.nonzero(self.discard_request_mask.np)[0]:
            if (made := self.input_batch.generators.get(int(row))) is not None:
                made.set_offset(made.get_offset() - 4)
        return sorted(self.input_batch.generators)

    before = {"_sample": sample, "_bookkeeping_sync": bookkeep}
    monkeypatch.setattr(plugin, "required", lambda _owner, name, *_parameters: before[name])
    for name in before:
        monkeypatch.setattr(GPUModelRunner, name, getattr(GPUModelRunner, name))
    plugin.keep_generators()
    made: Any = object.__new__(GPUModelRunner)
    batch = SimpleNamespace(num_reqs=2, generators={0: generator(3), 1: generator(4)})
    made.input_batch = batch
    made.discard_request_mask = SimpleNamespace(np=numpy.array([True, False, True]))
    return made


def test_only_a_kept_token_moves_the_generator(runner: Any) -> None:
    first = runner._sample(None, None)
    runner._bookkeeping_sync()
    second = runner._sample(None, None)
    assert second[0] == first[0] and second[1] != first[1]
    expected = generator(4)
    assert [first[1], second[1]] == [float(torch.rand(1, generator=expected)) for _ in range(2)]


def test_the_generators_are_there_again(runner: Any) -> None:
    assert runner._bookkeeping_sync() == [1]
    assert sorted(runner.input_batch.generators) == [0, 1]


def test_a_cpu_generator_has_no_offset() -> None:
    """When torch gives it one, this part of the plugin can go."""
    with pytest.raises(RuntimeError, match="does not use offset"):
        generator(1).get_offset()

"""Penalties of repeated tokens on the CPU platform: the logits are vLLM's, bit by bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")
plugin = pytest.importorskip("nibble.engine.plugin.cpu_penalties")
pytestmark = pytest.mark.vllm
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("vocabulary", [5, 1000, 151_936])
@pytest.mark.parametrize("tokens", [0, 3, 700])
def test_logits_are_those_of_vllm(tokens: int, vocabulary: int) -> None:
    from vllm.model_executor.layers.utils import apply_penalties

    torch.manual_seed(tokens + vocabulary)
    rows = 6
    logits = torch.randn(rows, vocabulary) * 5
    logits[:, :4] = torch.tensor([INF, -INF, NAN, 0.0])
    prompts = torch.randint(0, vocabulary + 1, (rows, 2 * tokens))  # `vocabulary` fills up
    outputs = torch.randint(0, vocabulary + 1, (rows, tokens))
    presence = torch.tensor([0.0, 1.5, 0.0, -0.7, 0.0, 2.0])
    frequency = torch.tensor([0.0, 0.0, 0.3, 1.1, 0.0, -2.0])
    repetition = torch.tensor([1.0, 1.0, 1.0, 1.05, 1.3, 0.5])
    given = (prompts, outputs, presence, frequency, repetition)
    theirs = apply_penalties(logits.clone(), *given)
    ours = plugin.apply_penalties(logits, *given)
    assert ours is logits
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


def test_the_sampler_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample.ops import penalties

    name = "apply_penalties"
    monkeypatch.setattr(penalties, name, getattr(penalties, name))
    plugin.change_few_logits()
    logits = torch.ones(2, 100)
    none, repeated = torch.zeros(2), torch.full((2,), 2.0)
    found = penalties.apply_all_penalties(
        logits, torch.tensor([[7], [100]]), none, none, repeated, [[-1, 3], [5]]
    )
    assert getattr(penalties, name) is plugin.apply_penalties
    assert (found == 0.5).nonzero().tolist() == [[0, 3], [0, 7], [1, 5]]

"""top-p on the CPU platform: the logits that stay are those of vLLM's sort."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")
plugin = pytest.importorskip("nibble.engine.plugin.cpu_top_p")
pytestmark = pytest.mark.vllm
INF, NAN = float("inf"), float("nan")


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch):
    """vLLM's function and the plugin's."""
    from vllm.v1.sample.ops import topk_topp_sampler

    name = "apply_top_k_top_p_pytorch"
    theirs = inspect.unwrap(getattr(topk_topp_sampler, name))  # a test may have loaded the plugin
    monkeypatch.setattr(topk_topp_sampler, name, theirs)
    plugin.sort_few_logits()
    ours = getattr(topk_topp_sampler, name)
    assert ours is not theirs

    def of_both(logits: Tensor, k: list[int] | None, p: list[float]) -> tuple[Tensor, Tensor]:
        counts = None if k is None else torch.tensor(k, dtype=torch.int32)
        found = [f(logits.clone(), counts, torch.tensor(p)) for f in (theirs, ours)]
        assert counts is None or counts.tolist() == k, "the batch's own tensor"
        return found[0], found[1]

    return of_both


@pytest.mark.parametrize("spread", [0.1, 3.0, 8.0])
@pytest.mark.parametrize("vocabulary", [1, 7, 1000, 49_152])
@pytest.mark.parametrize("with_k", [False, True])
def test_the_same_logits_stay(both, with_k: bool, vocabulary: int, spread: float) -> None:
    torch.manual_seed(vocabulary)
    logits = torch.randn(6, vocabulary) * spread
    k = [1, 2, 20, 50, vocabulary, vocabulary] if with_k else None
    k = k and [min(each, vocabulary) for each in k]
    theirs, ours = both(logits, k, [0.9, 0.01, 0.95, 0.5, 1.0, 0.99])
    assert torch.equal(ours, theirs)


def test_of_equal_logits_as_many_stay(both) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(40, 5000) * 2).bfloat16().float()
    theirs, ours = both(logits, [20, 5000] * 20, torch.rand(40).tolist())
    assert torch.equal(ours.sort().values, theirs.sort().values)
    kept = ours > -INF
    assert torch.equal(ours[kept], logits[kept])


@pytest.mark.parametrize(
    "row",
    [[-INF, -INF, -INF], [NAN, 1.0, 2.0], [-INF, 3.0, -INF], [0.0, 0.0, 0.0], [80.0, -80.0, 0.0]],
    ids=str,
)
@pytest.mark.parametrize("k", [None, [2]], ids=str)
def test_special_logits_leave_what_can_be_sampled(both, k, row: list[float]) -> None:
    logits = torch.tensor([row])
    theirs, ours = both(logits, k, [0.5])
    finite = theirs.isfinite() & logits.isfinite()
    if finite.any() and not logits.isnan().any():
        assert ours.isfinite().sum() == finite.sum() and ours.max() == theirs.max()
    else:
        assert torch.equal(ours, logits) or torch.equal(ours.isnan(), theirs.isnan())


def test_few_logits_are_sorted(both, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 151_936) * 5
    sizes = []
    sort = Tensor.sort
    monkeypatch.setattr(
        Tensor,
        "sort",
        lambda self, *a, **more: (sizes.append(len(self)), sort(self, *a, **more))[1],
    )
    both(logits, None, [0.9])
    assert sizes[0] == 1 and 0 < sizes[1] < 5000

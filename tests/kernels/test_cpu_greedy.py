"""Greedy tokens on the CPU platform: numpy's are vLLM's."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")
plugin = pytest.importorskip("nibble.engine.plugin.cpu_greedy")
pytestmark = pytest.mark.vllm
INF, NAN = float("inf"), float("nan")


def of_vllm(logits: torch.Tensor) -> torch.Tensor:
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return torch.ops._C.greedy_argmax(logits)


@pytest.mark.parametrize(
    "row",
    [
        [1.0, 2.0, 2.0, 1.0],
        [0.0, -0.0, 0.0, -0.0],
        [-INF, -INF, -INF, -INF],
        [1.0, INF, 3.0, INF],
        [1.0, NAN, 5.0, NAN],
        [NAN, NAN, INF, 0.0],
    ],
    ids=str,
)
def test_equal_and_special_logits_have_the_token_of_vllm(row: list[float]) -> None:
    logits = torch.tensor([row, row[::-1]])
    assert torch.equal(plugin.largest_logits(logits), of_vllm(logits))


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("vocabulary", [1, 7, 49_152])
def test_every_row_has_the_token_of_vllm(rows: int, vocabulary: int) -> None:
    logits = torch.randn(rows, vocabulary).bfloat16().float()  # with equal ones
    with torch.inference_mode():
        found = plugin.largest_logits(logits * 1)
    assert found.dtype == torch.int64 and torch.equal(found, of_vllm(logits))


def test_the_sampler_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample.sampler import Sampler

    monkeypatch.setattr(Sampler, "greedy_sample", vars(Sampler)["greedy_sample"])
    plugin.compare_in_vectors()
    assert Sampler.greedy_sample is plugin.largest_logits

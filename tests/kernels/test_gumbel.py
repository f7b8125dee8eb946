"""nibble::gumbel_argmax: the tokens of vLLM's operator, and of the definition."""

from __future__ import annotations

import pytest
import torch
from nibble_kernels.gumbel import gumbel_argmax, reference

INF, NAN = float("inf"), float("nan")
SPECIAL = [
    [-INF, -INF, -INF],
    [-INF, 2.0, -INF],
    [NAN, 1.0, 2.0],
    [1.0, NAN, 2.0],
    [INF, 1.0, INF],
    [1.0, INF, INF],
    [3e38, 3e38, -3e38],
    [0.0, -700.0, -1e30],
    [-1e30, 0.0, 0.0],
]


def of_vllm(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    pytest.importorskip("vllm")
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return torch.ops._C.fused_gumbel_argmax(logits, seeds)


@pytest.mark.vllm
@pytest.mark.parametrize("spread", [0.0, 0.5, 5.0, 30.0])
@pytest.mark.parametrize("vocabulary", [1, 2, 33, 5000, 151_936])
def test_tokens_are_those_of_vllm(vocabulary: int, spread: float) -> None:
    torch.manual_seed(vocabulary)
    rows = 8 if vocabulary > 100_000 else 300
    logits = torch.randn(rows, vocabulary) * spread
    logits[::3] = logits[::3].masked_fill(torch.rand(vocabulary) < 0.9, -INF)
    seeds = torch.randint(0, 2**31, (rows,))
    assert torch.equal(gumbel_argmax(logits, seeds), of_vllm(logits, seeds))


@pytest.mark.vllm
@pytest.mark.parametrize("row", SPECIAL, ids=str)
def test_special_logits_have_the_token_of_vllm(row: list[float]) -> None:
    logits = torch.tensor([row, row[::-1]] * 50)
    seeds = torch.arange(100) - 3
    assert torch.equal(gumbel_argmax(logits, seeds), of_vllm(logits, seeds))


def test_tokens_are_those_of_the_definition() -> None:
    torch.manual_seed(0)
    logits, seeds = torch.randn(200, 3000) * 3, torch.randint(0, 2**31, (200,))
    assert torch.equal(gumbel_argmax(logits, seeds), reference.gumbel_argmax(logits, seeds))


def test_tokens_have_the_probabilities_of_their_logits() -> None:
    draws = 100_000
    chances = torch.tensor([0.5, 0.3, 0.15, 0.05])
    tokens = gumbel_argmax(chances.log().repeat(draws, 1), torch.arange(draws))
    deviations = (chances * (1 - chances) / draws).sqrt()
    assert ((tokens.bincount() / draws - chances).abs() < 4 * deviations).all()


def test_rows_and_threads_change_no_token() -> None:
    logits, seeds = torch.randn(9, 4000), torch.arange(9)
    threads, whole = torch.get_num_threads(), gumbel_argmax(logits, seeds)
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        assert torch.equal(gumbel_argmax(logits, seeds), whole)
    torch.set_num_threads(threads)
    each = [gumbel_argmax(logits[row : row + 1], seeds[row : row + 1]) for row in range(9)]
    assert torch.equal(torch.cat(each), whole)


def test_what_does_not_fit_is_refused() -> None:
    from nibble_kernels import implementations

    if implementations()["cpu"] != "compiled":
        pytest.skip("the formula itself computes")
    for logits in (torch.zeros(2, 8).bfloat16(), torch.zeros(3, 8), torch.zeros(8, 2).T):
        with pytest.raises(RuntimeError, match="an int64 seed for each"):
            gumbel_argmax(logits, torch.arange(2))

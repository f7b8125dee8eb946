"""The log-probs that a server gives, compared with float32 arithmetic on the same NVFP4 numbers.

The Kullback-Leibler divergence is over the server's TOP likeliest tokens and one class for all
others, whose probability is what the first ones leave. This is the divergence of a coarser
distribution, so it is at most that of the whole one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "models")]

TOP = 256
ANSWER_TOP = 20
LEAST_REST = 1e-7  # a probability that float32 log-probs still tell from none

Ask = Callable[[str, Any], tuple[int, Any]]
# Log-probs by token id, of one position.
Position = dict[int, float]


class Answer(NamedTuple):
    """Token ids, and for each the server's log-probs of the likeliest tokens."""

    tokens: list[int]
    positions: list[Position]


def score(ask: Ask, ids: Sequence[int], top: int = TOP) -> list[Position]:
    """The server's log-probs of each token of a prompt but the first."""
    body = {"prompt": list(ids), "max_tokens": 1, "temperature": 0, "prompt_logprobs": top}
    status, found = ask("/v1/completions", {"model": "default", **body})
    assert status == 200, found
    return [
        {int(token): entry["logprob"] for token, entry in position.items()}
        for position in found["choices"][0]["prompt_logprobs"][1:]
    ]


def answers(ask: Ask, ids: Sequence[int], tokens: int, **more: Any) -> list[Answer]:
    """What the server says after `ids`, one for each of `n`."""
    body = {"prompt": list(ids), "max_tokens": tokens, "logprobs": ANSWER_TOP, "temperature": 0}
    body |= {"return_tokens_as_token_ids": True, "ignore_eos": True, **more}
    status, found = ask("/v1/completions", {"model": "default", **body})
    assert status == 200, found
    return [
        Answer(
            [_id(token) for token in choice["logprobs"]["tokens"]],
            [
                {_id(token): value for token, value in position.items()}
                for position in choice["logprobs"]["top_logprobs"]
            ],
        )
        for choice in found["choices"]
    ]


def _id(token: str) -> int:
    return int(token.removeprefix("token_id:"))


def divergence(found: Position, wanted: Tensor) -> float:
    """In nats, of `wanted` (log-probs of the vocabulary) from the server's."""
    tokens = torch.tensor(list(found))
    server = torch.tensor(list(found.values()), dtype=torch.float64)
    ours = wanted[tokens].double()
    total = float((ours.exp() * (ours - server)).sum())
    rest, server_rest = (max(1 - float(part.exp().sum()), LEAST_REST) for part in (ours, server))
    return total + rest * float(torch.tensor(rest / server_rest).log())


class Comparison(NamedTuple):
    """Of many positions."""

    tokens: int
    mean_kl_nats: float
    mean_difference: float  # of the log-prob of the text's token
    max_difference: float
    same_top_token: float


def compare(rows: Sequence[tuple[Sequence[int], Sequence[Position], Tensor]]) -> Comparison:
    """Of rows of (tokens, the server's log-probs of each, float32's of the same)."""
    divergences: list[float] = []
    differences: list[float] = []
    same = 0
    for tokens, positions, wanted in rows:
        for token, position, row in zip(tokens, positions, wanted, strict=True):
            divergences.append(divergence(position, row))
            differences.append(abs(position[token] - float(row[token])))
            same += max(position, key=position.__getitem__) == int(row.argmax())
    count = len(divergences)
    return Comparison(
        count,
        sum(divergences) / count,
        sum(differences) / count,
        max(differences),
        same / count,
    )


class Reference:
    """The model in transformers, in float32 or another type."""

    def __init__(self, network: Any) -> None:
        self.network = network
        self._prompts: dict[tuple[int, ...], Tensor] = {}  # 100 MB for one of 512 tokens

    @torch.inference_mode()
    def logprobs(self, ids: Sequence[int], first: int = 1) -> Tensor:
        """[len(ids) - first, vocabulary]: of each token from the one at `first` on."""
        kept = len(ids) - first + 1
        logits = self.network(torch.tensor([list(ids)]), logits_to_keep=kept).logits[0, :-1]
        return logits.float().log_softmax(-1)

    def compare_prompts(self, ask: Ask, rows: Sequence[Sequence[int]]) -> Comparison:
        """Of all tokens of `rows` but the first of each."""
        for ids in rows:
            if tuple(ids) not in self._prompts:
                self._prompts[tuple(ids)] = self.logprobs(ids)
        return compare([(ids[1:], score(ask, ids), self._prompts[tuple(ids)]) for ids in rows])

    def compare_answers(self, prompt: Sequence[int], found: Sequence[Answer]) -> Comparison:
        """Of the tokens that the server chose after `prompt`."""
        return compare(
            [
                (
                    answer.tokens,
                    answer.positions,
                    self.logprobs([*prompt, *answer.tokens], len(prompt)),
                )
                for answer in found
            ]
        )


@contextmanager
def reference(folder: Path, activations: str, dtype: torch.dtype = torch.float32):
    """A ModelOpt NVFP4 checkpoint in transformers; `activations` fp4 or bf16."""
    from emulate_nvfp4 import nvfp4_model

    def without_input_scales(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".input_scale")]:
            del tensors[name]

    change = without_input_scales if activations == "bf16" else (lambda tensors: None)
    with nvfp4_model(folder, change) as network:
        yield Reference(network.to(dtype))

"""Log-probs of fixed texts: the same model gives the same ones, up to the order of additions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nibble.bench.served import Served, reason_of
from nibble.errors import ExitCode, NibbleError
from nibble.serve.endpoint import Endpoint

TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "Water boils at one hundred degrees Celsius at the level of the sea.",
    "def add(a, b):\n    return a + b\n",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12",
)
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Scores:
    """Log-probs in nats of each text's tokens after the first, and all token ids."""

    logprobs: tuple[tuple[float, ...], ...]
    ids: tuple[int, ...]


def score(endpoint: Endpoint, served: Served) -> Scores:
    """Scores of TEXTS now. OSError without an answer; raises CONFIG where the server gives none."""
    all_scores, ids = [], []
    for text in TEXTS:
        body = {
            "model": served.name,
            "prompt": text,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
            "return_token_ids": True,
        }
        status, answer = endpoint.call("/v1/completions", body, _TIMEOUT_S)
        if status in (429, 503):
            raise ConnectionError(f"status {status}")
        try:
            if status != 200:
                raise ValueError(f"status {status}: {reason_of(answer)}")
            scores, found = read_scores(json.loads(answer))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise NibbleError(
                ExitCode.CONFIG,
                what=f"the server gives no log-probs of prompts ({error})",
                expected="a model that generates text",
                action="see the server's log",
            ) from None
        all_scores.append(scores)
        ids += found
    return Scores(tuple(all_scores), tuple(ids))


def read_scores(answer: Mapping[str, Any]) -> tuple[tuple[float, ...], list[int]]:
    """(log-probs after the first token, ids) of an answer of vLLM with `prompt_logprobs`. Pure."""
    choice = answer["choices"][0]
    ids = [int(token) for token in choice["prompt_token_ids"]]
    by_token = choice["prompt_logprobs"][1:]
    scores = tuple(
        float(one[str(token)]["logprob"]) for one, token in zip(by_token, ids[1:], strict=True)
    )
    return scores, ids


def drift(before: Scores, after: Scores) -> float:
    """The mean absolute change of a token's log-prob in nats, of the text where it is largest.
    Infinite where a text has other tokens, or a log-prob is not a number. Pure.
    """
    largest = 0.0
    for old, new in zip(before.logprobs, after.logprobs, strict=True):
        if len(old) != len(new):
            return float("inf")
        if old:
            mean = sum(abs(a - b) for a, b in zip(old, new, strict=True)) / len(old)
            if not mean < float("inf"):
                return float("inf")
            largest = max(largest, mean)
    return largest

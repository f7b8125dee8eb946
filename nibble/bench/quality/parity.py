"""Parity: how far a server's next-token probabilities on a fixed text are from a reference's.

Both score the same token ids. The server names its most likely tokens at each place (vLLM's
`prompt_logprobs`); the probability of all others is one remainder. KL is that of these coarser
distributions, which is never above that of the whole ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nibble.bench.served import Served, reason_of
from nibble.errors import ExitCode, NibbleError
from nibble.serve.endpoint import Endpoint

FORMAT = "nibble eval log-probs 1"
TOP, _TIMEOUT_S, _SMALLEST = 20, 600.0, 1e-12
TEXT = Path(__file__).with_name("text.txt")
_MALFORMED = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Scored:
    """A text's token ids, and for each after the first the log-probs of likely tokens by id."""

    model: str
    ids: tuple[int, ...]
    places: tuple[Mapping[int, float], ...]

    def to_json(self) -> dict[str, Any]:
        places = [{str(token): round(p, 6) for token, p in one.items()} for one in self.places]
        return {"format": FORMAT, "model": self.model, "ids": list(self.ids), "places": places}


@dataclass(frozen=True)
class Parity:
    """`kl_nats`: mean and largest over places; `top1`: share of places with one favourite."""

    tokens: int
    kl_nats: float
    kl_max_nats: float
    top1: float
    perplexity: float
    reference_perplexity: float

    def to_json(self) -> dict[str, Any]:
        return {name: round(value, 6) for name, value in vars(self).items()}


def score(endpoint: Endpoint, served: Served, prompt: str | Sequence[int]) -> Scored:
    """Score `prompt`. OSError without an answer; raises CONFIG where the server gives no
    log-probs.
    """
    body = {
        "model": served.name,
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": TOP,
        "return_token_ids": True,
    }
    status, answer = endpoint.call("/v1/completions", body, _TIMEOUT_S)
    if status in (429, 503):
        raise ConnectionError(f"status {status}: {reason_of(answer)}")
    try:
        if status != 200:
            raise ValueError(f"status {status}: {reason_of(answer)}")
        choice = json.loads(answer)["choices"][0]
        ids = tuple(int(token) for token in choice["prompt_token_ids"])
        return Scored(served.id, ids, _places(choice["prompt_logprobs"][1:]))
    except _MALFORMED as error:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"the server at {endpoint.address} gives no log-probs of prompts ({error})",
            expected="vLLM with a model that generates text",
            action="see the server's log",
        ) from None


def _places(found: Sequence[Mapping[str, Any]]) -> tuple[Mapping[int, float], ...]:
    return tuple(
        {int(token): float(value["logprob"]) for token, value in one.items()} for one in found
    )


def fit(endpoint: Endpoint, served: Served, text: str) -> Scored:
    """Score the text's beginning that fits into the server's context."""
    status, answer = endpoint.call("/tokenize", {"model": served.name, "prompt": text}, _TIMEOUT_S)
    ids = json.loads(answer).get("tokens") if status == 200 else None
    if not ids:
        return score(endpoint, served, text)
    return score(endpoint, served, ids[: served.max_model_len - 1])


def compare(found: Scored, reference: Scored) -> Parity:
    """Raises CONFIG where the two have other tokens. Pure."""
    if found.ids != reference.ids or len(found.ids) < 2:
        raise NibbleError(
            ExitCode.CONFIG,
            what=(
                f"{found.model} and {reference.model} have other tokens for the text"
                f" ({len(found.ids)} and {len(reference.ids)})"
            ),
            expected="two servers of one model",
            action="compare with a reference of the same model, and the same --text",
        )
    pairs = list(zip(found.places, reference.places, strict=True))
    each = [kl(theirs, ours) for ours, theirs in pairs]
    same = sum(_favourite(ours) == _favourite(theirs) for ours, theirs in pairs)
    return Parity(
        tokens=len(pairs),
        kl_nats=sum(each) / len(each),
        kl_max_nats=max(each),
        top1=same / len(pairs),
        perplexity=perplexity(found),
        reference_perplexity=perplexity(reference),
    )


def kl(reference: Mapping[int, float], other: Mapping[int, float]) -> float:
    """KL(reference || other) in nats over the tokens that both name, and the rest as one. Infinite
    where a log-prob is not a number. Pure.
    """
    both = reference.keys() & other.keys()
    if any(not math.isfinite(one[token]) for token in both for one in (reference, other)):
        return math.inf
    found = sum(math.exp(reference[token]) * (reference[token] - other[token]) for token in both)
    rests = [
        max(_SMALLEST, 1 - sum(math.exp(one[token]) for token in both))
        for one in (reference, other)
    ]
    return max(0.0, found + rests[0] * math.log(rests[0] / rests[1]))


def _favourite(place: Mapping[int, float]) -> int:
    return min(place, key=lambda token: (-place[token], token))


def perplexity(scored: Scored) -> float:
    """Of the text. Pure."""
    own = [place[token] for place, token in zip(scored.places, scored.ids[1:], strict=True)]
    return math.exp(-sum(own) / len(own))


def write_scored(scored: Scored, path: Path) -> None:
    """Raises CONFIG where the file cannot be written or exists."""
    try:
        with path.open("x") as file:
            json.dump(scored.to_json(), file)
    except OSError as error:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{path} cannot be written ({error.strerror})",
            expected="a new file",
            action="name another file with --record",
        ) from None


def read_scored(path: Path) -> Scored:
    """Raises USAGE where the file is not a recording."""
    try:
        found = json.loads(path.read_text())
        if found["format"] != FORMAT:
            raise ValueError(f"its format is {found['format']!r}")
        ids = tuple(int(token) for token in found["ids"])
        places = tuple({int(t): float(p) for t, p in one.items()} for one in found["places"])
        if len(places) != len(ids) - 1 or not all(
            token in place for place, token in zip(places, ids[1:], strict=True)
        ):
            raise ValueError("tokens and log-probs do not match")
        return Scored(str(found["model"]), ids, places)
    except (OSError, *_MALFORMED) as error:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise NibbleError(
            ExitCode.USAGE,
            what=f"{path} is not a recording of `nibble eval` ({why})",
            expected="a file that `nibble eval --record` wrote",
            action="correct --against",
        ) from None

"""The canary's requests: greedy answers with log-probs, and scored texts, before a deadline."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nibble.canary.finding import Broken, NotCompared
from nibble.engine.api import Api
from nibble.reference.prompts import NO_THINKING

Messages = Sequence[Mapping[str, str]]
# Reasoning models answer at once where their template knows one of these; others ignore them.
KWARGS = "chat_template_kwargs"
# A model's generation_config.json may have others, and the greedy token is then not the likeliest
# one.
PLAIN = {"temperature": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}


@dataclass(frozen=True)
class Answer:
    """A generated text. `logprobs` of its tokens; `best` and `runner_up` of the two likeliest at
    each place.
    """

    text: str
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    best: tuple[float, ...]
    runner_up: tuple[float, ...]


class Asker:
    """Asks `model` until `budget_s` is over; then every question is NotCompared. OSError where
    the server goes away.
    """

    def __init__(self, api: Api, model: str, budget_s: float) -> None:
        self.api, self.model = api, model
        self._until = time.monotonic() + budget_s

    def warm_up(self) -> None:
        """Everything once: vLLM compiles what log-probs need when they are first asked for. A
        refusal is for later.
        """
        with contextlib.suppress(Broken, NotCompared, KeyError, IndexError, TypeError, ValueError):
            self.score(self.answer("Hello", 2, ignore_eos=True).ids)

    def answer(self, prompt: str | Messages | Sequence[int], tokens: int, **more: Any) -> Answer:
        """The greedy answer to a text, a conversation or token ids; `more` goes into the
        request.
        """
        body = {"max_tokens": tokens, "return_token_ids": True, **PLAIN, **more}
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            choice, ids = self._choice("/v1/completions", body | {"prompt": prompt, "logprobs": 2})
            found = choice["logprobs"]
            pairs = list(zip(found["token_logprobs"], found["top_logprobs"], strict=True))
            tops = [sorted(top.values(), reverse=True) for _, top in pairs]
            own = [number(value) for value, _ in pairs]
            return _answer(
                choice["text"], ids or choice["prompt_token_ids"], choice["token_ids"], own, tops
            )
        request = body | {
            "messages": prompt,
            "logprobs": True,
            "top_logprobs": 2,
            KWARGS: NO_THINKING,
        }
        choice, ids = self._choice("/v1/chat/completions", request)
        content = choice["logprobs"]["content"]
        tops = [
            sorted((top["logprob"] for top in one["top_logprobs"]), reverse=True) for one in content
        ]
        own = [number(one["logprob"]) for one in content]
        return _answer(choice["message"]["content"] or "", ids, choice["token_ids"], own, tops)

    def score(self, ids: Sequence[int]) -> list[float]:
        """Log-prob of each token after the first, computed as a prompt: without drafting, and
        without the prefix cache.
        """
        body = {"prompt": list(ids), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        choice, _ = self._choice("/v1/completions", body)
        found = choice["prompt_logprobs"][1:]
        return [
            number(place[str(token)]["logprob"])
            for place, token in zip(found, ids[1:], strict=True)
        ]

    def chat(self, messages: Messages, tokens: int, **more: Any) -> dict[str, Any]:
        """The message of a greedy chat answer."""
        body = {
            "messages": messages,
            "max_tokens": tokens,
            KWARGS: NO_THINKING,
            **PLAIN,
            **more,
        }
        return self._choice("/v1/chat/completions", body)[0]["message"]

    def has_chat(self) -> bool:
        """Whether the model has a chat template."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 1,
        }
        status, text = self._call("/v1/chat/completions", body)
        if status >= 500:
            raise _refused("/v1/chat/completions", status, text)
        return status == 200

    def metrics(self) -> str:
        """What /metrics says."""
        status, text = self._call("/metrics", None)
        if status != 200:
            raise _refused("/metrics", status, text)
        return text.decode(errors="replace")

    def _choice(self, path: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
        status, text = self._call(path, {"model": self.model, **body})
        if (
            status == 400 and KWARGS in body
        ):  # Mistral's tokenizers take none (vllm 0.32 tokenizers/mistral.py:147)
            return self._choice(
                path, {name: value for name, value in body.items() if name != KWARGS}
            )
        if status != 200:
            raise _refused(path, status, text)
        answer = json.loads(text)
        choice = answer["choices"][0]
        if "prompt_logprobs" not in choice:
            choice["prompt_logprobs"] = answer.get("prompt_logprobs")
        return choice, answer.get("prompt_token_ids") or []

    def _call(self, path: str, body: Mapping[str, Any] | None) -> tuple[int, bytes]:
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise NotCompared("the canary's time was over")
        try:
            return self.api.call(path, body, left_s)
        except TimeoutError:
            raise NotCompared("no answer in time") from None


def _answer(
    text: str, prompt: Sequence[int], ids: Sequence[int], own: list[float], tops: list[list[float]]
) -> Answer:
    best = tuple(number(top[0]) for top in tops)
    second = tuple(number(top[1]) if len(top) > 1 else -math.inf for top in tops)
    return Answer(text, tuple(prompt), tuple(ids), tuple(own), best, second)


def _refused(path: str, status: int, text: bytes) -> Broken | NotCompared:
    what = f"{path} answered {status}: {' '.join(text.decode(errors='replace').split())[:200]}"
    return Broken(what) if status >= 500 else NotCompared(what)


def number(value: Any) -> float:
    """A log-prob as a number; what is none (null, as JSON has no NaN) is NaN."""
    return float(value) if isinstance(value, int | float) else math.nan

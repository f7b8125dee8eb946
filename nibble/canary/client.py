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
# NO_THINKING's variables of the chat template switch reasoning off. Other templates ignore them.
KWARGS = "chat_template_kwargs"
# The model's generation_config.json may set other values, and a penalty changes which token is
# the most probable one.
PLAIN = {"temperature": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
# /v1/completions names the most probable tokens by their text. Tokens with one text, such as parts
# of a character, would become one entry, and the runner-up would be missing.
BY_ID = {"return_tokens_as_token_ids": True}


@dataclass(frozen=True)
class Answer:
    """A generated text and its tokens. All log-probs are in nats.

    logprobs: of each generated token; best, runner_up: of the two most probable tokens at each
    position.
    """

    text: str
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    best: tuple[float, ...]
    runner_up: tuple[float, ...]


class Asker:
    """Sends the canary's requests to `model` for at most `budget_s` seconds.

    Later requests raise NotCompared. A server that closes the connection raises OSError.
    """

    def __init__(self, api: Api, model: str, budget_s: float) -> None:
        self.api, self.model = api, model
        self._until = time.monotonic() + budget_s

    def warm_up(self) -> None:
        """Send each kind of request once: vLLM compiles the code for log-probs at the first use.

        Ignores refusals; the mechanisms report them.
        """
        with contextlib.suppress(Broken, NotCompared, KeyError, IndexError, TypeError, ValueError):
            self.score(self.answer("Hello", 2, ignore_eos=True).ids)

    def answer(self, prompt: str | Messages | Sequence[int], tokens: int, **more: Any) -> Answer:
        """The greedy answer of at most `tokens` tokens to a text, a conversation or token ids.

        `more`: further fields of the request.
        """
        body = {"max_tokens": tokens, "return_token_ids": True, **PLAIN, **more}
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            text = {"prompt": prompt, "logprobs": 2, **BY_ID}
            choice, ids = self._choice("/v1/completions", body | text)
            logprobs = choice["logprobs"]
            tops = [sorted(top.values(), reverse=True) for top in logprobs["top_logprobs"]]
            chosen = [number(value) for value in logprobs["token_logprobs"]]
            prompt_ids = ids or choice["prompt_token_ids"]
            return _answer(choice["text"], prompt_ids, choice["token_ids"], chosen, tops)
        chat = {"messages": prompt, "logprobs": True, "top_logprobs": 2, KWARGS: NO_THINKING}
        choice, ids = self._choice("/v1/chat/completions", body | chat)
        content = choice["logprobs"]["content"]
        tops = [
            sorted((top["logprob"] for top in token["top_logprobs"]), reverse=True)
            for token in content
        ]
        chosen = [number(token["logprob"]) for token in content]
        return _answer(choice["message"]["content"] or "", ids, choice["token_ids"], chosen, tops)

    def score(self, ids: Sequence[int]) -> list[float]:
        """The log-prob of each token after the first in nats, when `ids` are a prompt.

        vLLM scores a prompt without drafting and without the prefix cache.
        """
        body = {"prompt": list(ids), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        choice, _ = self._choice("/v1/completions", body)
        scores = choice["prompt_logprobs"][1:]  # the first token has none
        return [
            number(by_token[str(token)]["logprob"])
            for by_token, token in zip(scores, ids[1:], strict=True)
        ]

    def chat(self, messages: Messages, tokens: int, **more: Any) -> dict[str, Any]:
        """The message of a greedy chat answer of at most `tokens` tokens."""
        body = {"messages": messages, "max_tokens": tokens, KWARGS: NO_THINKING, **PLAIN, **more}
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
        """The text of /metrics."""
        status, text = self._call("/metrics", None)
        if status != 200:
            raise _refused("/metrics", status, text)
        return text.decode(errors="replace")

    def _choice(self, path: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
        status, text = self._call(path, {"model": self.model, **body})
        # Mistral's tokenizers refuse the field (vllm 0.32 tokenizers/mistral.py:147).
        if status == 400 and KWARGS in body:
            without = {name: value for name, value in body.items() if name != KWARGS}
            return self._choice(path, without)
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
    text: str,
    prompt_ids: Sequence[int],
    ids: Sequence[int],
    chosen: list[float],
    tops: list[list[float]],
) -> Answer:
    """`chosen`: log-probs of `ids`; `tops`: the highest log-probs at each position, sorted."""
    best = tuple(number(top[0]) for top in tops)
    second = tuple(number(top[1]) if len(top) > 1 else -math.inf for top in tops)
    return Answer(text, tuple(prompt_ids), tuple(ids), tuple(chosen), best, second)


def _refused(path: str, status: int, text: bytes) -> Broken | NotCompared:
    what = f"{path} answered {status}: {' '.join(text.decode(errors='replace').split())[:200]}"
    return Broken(what) if status >= 500 else NotCompared(what)


def number(value: Any) -> float:
    """A log-prob of a JSON answer. vLLM sends null for NaN, which JSON does not have."""
    return float(value) if isinstance(value, int | float) else math.nan

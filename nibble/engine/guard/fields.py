"""Refuses field values that cost vLLM seconds of CPU time or end in status 500. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nibble.engine.guard.contents import (
    BATCH,
    COMPLETIONS,
    MEDIA_KEYS,
    NO_TEXT_KEYS,
    Body,
    count_answers,
    count_chars,
    count_messages,
    count_prompts,
    texts,
)
from nibble.engine.guard.limits import SMALL_BYTES, RequestLimits
from nibble.engine.guard.logprob_fields import logprob_problem

MAX_STOP_CHARS = 4096  # vLLM compares each token of each answer with them
# vLLM 0.32 checks its limit, VLLM_MAX_NUM_BAD_WORDS, only after it has tokenized all of them.
MAX_BAD_WORDS = 128
MAX_BAD_WORDS_CHARS = 8192
MAX_LOGIT_BIAS = 1024
MAX_BEAM_WIDTH = 64  # each step of a beam search computes twice as many log-probs for each beam
MAX_NAME_CHARS = 1024
LEAST_TEXT_CHARS = 4 << 20
TEXT_CHARS_PER_TOKEN = 8  # twice the average of English text
# Evaluation tools send batches of prompts as token ids; OpenAI's clients send 1000 x 250 ids in one
# request for embeddings.
LEAST_ITEMS, LEAST_POOLING_ITEMS = 1 << 18, 1 << 20
POOLING_FACTOR = 2

# In a body of SMALL_BYTES no value of these fields costs much.
_CHEAP_FIELDS = frozenset(
    "frequency_penalty max_completion_tokens max_tokens messages min_p presence_penalty seed stream"
    " stream_options temperature top_k top_p model".split()
)

_NAMES = frozenset(
    {"model", "user", "request_id", "cache_salt", "session_id", "previous_response_id"}
)
# Routes that run one pass per input and generate no tokens, so they allow more inputs. OpenAI's
# limit for /v1/embeddings is 2048.
_POOLING = frozenset(
    "/v1/embeddings /v2/embed /rerank /v1/rerank /v2/rerank /score /v1/score /classify".split()
)
_STOPS = frozenset({"stop", "stop_sequences"})


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of the served model that limits depend on; None if unknown (an app without an engine).

    longest_token_chars: characters of the longest token; takes_media: it accepts images, audio or
    video.
    """

    context_tokens: int | None = None
    longest_token_chars: int | None = None
    takes_media: bool = True

    @classmethod
    def of_app(cls, app: Any) -> ModelFacts:
        """From vLLM's own state (vllm 0.32 launchers/api_server/app_state.py init_app_state)."""
        config = getattr(getattr(app, "state", None), "vllm_config", None)
        if config is None:
            return cls()
        tokenizer = None
        if not config.model_config.skip_tokenizer_init:
            tokenizer = app.state.engine_client.get_tokenizer()
        return cls(
            context_tokens=config.model_config.max_model_len,
            longest_token_chars=getattr(tokenizer, "max_chars_per_token", None),
            takes_media=bool(config.model_config.is_multimodal_model),
        )

    def max_items(self, path: str, limits: RequestLimits) -> int:
        """The limit for items of a JSON body: a prompt as token ids that fills the context fits."""
        least = LEAST_POOLING_ITEMS if path in _POOLING else LEAST_ITEMS
        return limits.max_json_items or least + 2 * (self.context_tokens or 0)

    def max_textchars(self, limits: RequestLimits) -> int:
        """The limit for the characters of all text in a request."""
        least = max(LEAST_TEXT_CHARS, TEXT_CHARS_PER_TOKEN * (self.context_tokens or 0))
        return limits.max_text_chars or least

    def max_promptchars(self) -> int | None:
        """The limit for the characters of one text: a context full of the longest token.

        vLLM has the same limit (vllm 0.32 renderers/params.py:384), except for /tokenize.
        """
        if self.context_tokens is None or self.longest_token_chars is None:
            return None
        return self.context_tokens * self.longest_token_chars


def is_small(path: str, body: Body, size: int, limits: RequestLimits) -> bool:
    """Whether a body of `size` bytes needs no check of its fields, as is true of most requests.

    Nothing in it can exceed a limit, and it has no grammar.
    """
    return (
        size <= SMALL_BYTES
        and body.keys() <= _CHEAP_FIELDS
        and path != BATCH
        and limits.allow_small_bodies
    )


def field_problem(
    path: str, body: Body, size: int, limits: RequestLimits, facts: ModelFacts
) -> str | None:
    """The reason to refuse `body` of `size` bytes, or None."""
    problems = (
        _long_names(body),
        _too_many(body, path, limits),
        _stop_problem(body),
        _bad_words_problem(body),
        _bias_problem(body),
        _extra_arguments_problem(body),
        logprob_problem(path, body, limits, facts.context_tokens),
        _token_problem(path, body, size, facts),
        _text_problem(body, size, limits, facts),
    )
    return next(filter(None, problems), None)


def _long_names(body: Body) -> str | None:
    for name in _NAMES & body.keys():
        value = body[name]
        if isinstance(value, str) and len(value) > MAX_NAME_CHARS:
            return f"`{name}` is longer than {MAX_NAME_CHARS} characters."
    return None


def _too_many(body: Body, path: str, limits: RequestLimits) -> str | None:
    if count_messages(path, body, limits.max_messages) > limits.max_messages:
        return (
            f"The request has more than {limits.max_messages} messages and parts"
            " (NIBBLE_MAX_MESSAGES)."
        )
    if body.get("use_beam_search") and count_answers(body) > MAX_BEAM_WIDTH:
        return f"`n` is above {MAX_BEAM_WIDTH}, the widest beam search."
    limit = limits.max_sequences
    if path in _POOLING:
        if count_prompts(path, body) > (limit := limit * POOLING_FACTOR):
            return (
                f"The request has more than {limit} inputs ({POOLING_FACTOR} times"
                " NIBBLE_MAX_SEQUENCES)."
            )
    elif count_sequences(path, body) > limit:
        return f"The request asks for more than {limit} sequences (NIBBLE_MAX_SEQUENCES)."
    return None


def count_sequences(path: str, body: Body) -> int:
    """Prompts times answers: the sequences that the engine runs for the request."""
    return count_prompts(path, body) * count_answers(body)


def _stop_problem(body: Body) -> str | None:
    for name in _STOPS & body.keys():
        if count_chars(body[name]) > MAX_STOP_CHARS:
            return f"`{name}` has more than {MAX_STOP_CHARS} characters."
    return None


def _bad_words_problem(body: Body) -> str | None:
    words = body.get("bad_words")
    if isinstance(words, list) and len(words) > MAX_BAD_WORDS:
        return f"`bad_words` has more than {MAX_BAD_WORDS} entries."
    if count_chars(words) > MAX_BAD_WORDS_CHARS:
        return f"`bad_words` has more than {MAX_BAD_WORDS_CHARS} characters."
    return None


def _bias_problem(body: Body) -> str | None:
    bias = body.get("logit_bias")
    if isinstance(bias, dict) and len(bias) > MAX_LOGIT_BIAS:
        return f"`logit_bias` has more than {MAX_LOGIT_BIAS} entries."
    return None


def _extra_arguments_problem(body: Body) -> str | None:
    """Two keys that `vllm_xargs` may not have: vLLM merges it with the fields of the same names,
    and other values than objects end in status 500.
    """
    extra = body.get("vllm_xargs")
    for name in ("kv_transfer_params", "ec_transfer_params"):
        if isinstance(extra, dict) and name in extra:
            return (
                f"`vllm_xargs` contains {name}. Expected: `{name}` as a top-level object. Move it."
            )
    return None


def _token_problem(path: str, body: Body, size: int, facts: ModelFacts) -> str | None:
    """A prompt of token ids that exceeds the context. vLLM checks that only after each token."""
    limit, prompt = facts.context_tokens, body.get("prompt")
    if (
        limit is None
        or size <= 2 * limit
        or path != COMPLETIONS
        or body.get("truncate_prompt_tokens") is not None
    ):
        return None
    if not isinstance(prompt, list) or not prompt:
        return None
    tokens = len(prompt) if isinstance(prompt[0], int) else max(map(_length, prompt))
    if tokens > limit:
        return (
            f"A prompt of {tokens} tokens cannot fit: this model's maximum context length is"
            f" {limit} tokens."
        )
    return None


def _length(tokens: Any) -> int:
    return len(tokens) if isinstance(tokens, list) else 0


def _text_problem(body: Body, size: int, limits: RequestLimits, facts: ModelFacts) -> str | None:
    all_chars, one_chars = facts.max_textchars(limits), facts.max_promptchars()
    if size <= min(all_chars, one_chars or all_chars):
        return None
    problem = _long_text(body, NO_TEXT_KEYS | MEDIA_KEYS, all_chars, one_chars, facts)
    if (
        problem is None
        and not facts.takes_media
        and _long_text(body, NO_TEXT_KEYS, all_chars, one_chars, facts)
    ):
        return "This model takes no images, audio or video."
    return problem


def _long_text(
    body: Body, skipped: frozenset[str], all_chars: int, one_chars: int | None, facts: ModelFacts
) -> str | None:
    truncated = body.get("truncate_prompt_tokens") is not None
    total = 0
    for text in texts(body, skipped):
        total += len(text)
        if one_chars is not None and len(text) > one_chars and not truncated:
            return (
                f"A text of {len(text)} characters cannot fit: this model's maximum context length"
                f" is {facts.context_tokens} tokens of at most {facts.longest_token_chars}"
                " characters."
            )
        if total > all_chars:
            return (
                f"The text of the request is longer than {all_chars} characters"
                " (NIBBLE_MAX_TEXT_CHARS)."
            )
    return None

"""Fields of a parsed body whose values cost vLLM seconds, or status 500, for one request. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nibble.guard.limits import SMALL_BYTES, RequestLimits

Body = Mapping[str, Any]

# Each token of each answer is compared with them.
MAX_STOP_CHARS = 4096
MAX_BAD_WORDS = 128  # vllm 0.32 VLLM_MAX_NUM_BAD_WORDS, which is asked after all are tokenized
MAX_BAD_WORDS_CHARS = 8192
MAX_LOGIT_BIAS = 1024
MAX_BEAM_WIDTH = 64  # each step of a search asks for twice as many log-probs for each beam
MAX_NAME_CHARS = 1024
LEAST_TEXT_CHARS = 4 << 20
TEXT_CHARS_PER_TOKEN = 8  # twice what English takes
CHARS_PER_LOGPROB_TOKEN = 3  # an estimate: the text is not tokenized yet
LEAST_ITEMS = 1 << 16

# What costs little however it is set, in a body of SMALL_BYTES.
_PLAIN = frozenset({
    "frequency_penalty", "max_completion_tokens", "max_tokens", "messages", "min_p", "presence_penalty", "seed", "stream",
    "stream_options", "temperature", "top_k", "top_p",
    "model",
})  # fmt: skip

_NAMES = frozenset({"model", "user", "request_id", "cache_salt", "session_id", "previous_response_id"})
_SEQUENCES = frozenset({
    "prompt", "input", "inputs", "texts", "documents", "queries", "data_1", "data_2", "text_1", "text_2", "items",
})  # fmt: skip
_STOPS = frozenset({"stop", "stop_sequences"})
_CONVERSATIONS = "/v1/chat/completions/batch"
# What holds media in base64 or a URL, and constraints, which are no text of the prompt.
_MEDIA_KEYS = frozenset({
    "image_url", "audio_url", "video_url", "input_audio", "image_embeds", "audio_embeds", "image", "images", "audio",
    "video", "videos", "source", "file_data", "data",
})  # fmt: skip
_NO_TEXT_KEYS = frozenset({"prompt_embeds", "structured_outputs", "response_format", "kv_transfer_params"})


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What limits hang on; None where the app does not say (an app without an engine)."""

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

    def max_items(self, limits: RequestLimits) -> int:
        """A prompt may come as token ids, so the context must fit."""
        return limits.max_json_items or LEAST_ITEMS + 2 * (self.context_tokens or 0)

    def max_text_chars(self, limits: RequestLimits) -> int:
        """Of all text of a request."""
        least = max(LEAST_TEXT_CHARS, TEXT_CHARS_PER_TOKEN * (self.context_tokens or 0))
        return limits.max_text_chars or least

    def max_prompt_chars(self) -> int | None:
        """Of one text: what the context holds if each token is the vocabulary's longest.

        vLLM refuses longer texts by the same rule (vllm 0.32 renderers/params.py:384), but not for /tokenize.
        """
        if self.context_tokens is None or self.longest_token_chars is None:
            return None
        return self.context_tokens * self.longest_token_chars


def field_problem(path: str, body: Body, size: int, limits: RequestLimits, facts: ModelFacts) -> str | None:
    """The reason to refuse `body`, which came in `size` bytes; None where it may pass."""
    if size <= SMALL_BYTES and body.keys() <= _PLAIN and limits.allow_small_bodies:
        return None  # most requests: nothing in them can be too many or too long
    problems = (
        _long_names(body),
        _too_many(body, path, limits),
        _stop_problem(body),
        _bad_words_problem(body),
        _bias_problem(body),
        _extra_arguments_problem(body),
        _logprobs_problem(body, limits, facts),
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
    messages = body.get("messages")
    conversations = messages if path == _CONVERSATIONS and isinstance(messages, list) else [messages]
    chats = [*conversations, body.get("input") if path == "/v1/responses" else None]
    if sum(_messages(chat) for chat in chats) > limits.max_messages:
        return f"The request has more than {limits.max_messages} messages and parts (NIBBLE_MAX_MESSAGES)."
    answers = max(1, _whole(body.get("n")), _whole(body.get("best_of")))
    if body.get("use_beam_search") and answers > MAX_BEAM_WIDTH:
        return f"`n` is above {MAX_BEAM_WIDTH}, the widest beam search."
    prompts = max([len(conversations), *(_prompts(body[name]) for name in _SEQUENCES & body.keys())])
    if answers * prompts > limits.max_sequences:
        return f"The request asks for more than {limits.max_sequences} sequences (NIBBLE_MAX_SEQUENCES)."
    return None


def _messages(chat: Any) -> int:
    """Messages of a conversation, and the parts that their contents are made of."""
    if not isinstance(chat, list):
        return 0
    contents = [message.get("content") for message in chat if isinstance(message, dict)]
    return len(chat) + sum(len(content) for content in contents if isinstance(content, list))


def _prompts(value: Any) -> int:
    """How many prompts a field holds: a list of numbers is one."""
    if not isinstance(value, list) or not value or isinstance(value[0], int | float):
        return 1
    return len(value)


def _stop_problem(body: Body) -> str | None:
    for name in _STOPS & body.keys():
        if _chars(body[name]) > MAX_STOP_CHARS:
            return f"`{name}` has more than {MAX_STOP_CHARS} characters."
    return None


def _bad_words_problem(body: Body) -> str | None:
    words = body.get("bad_words")
    if isinstance(words, list) and len(words) > MAX_BAD_WORDS:
        return f"`bad_words` has more than {MAX_BAD_WORDS} entries."
    if _chars(words) > MAX_BAD_WORDS_CHARS:
        return f"`bad_words` has more than {MAX_BAD_WORDS_CHARS} characters."
    return None


def _bias_problem(body: Body) -> str | None:
    bias = body.get("logit_bias")
    if isinstance(bias, dict) and len(bias) > MAX_LOGIT_BIAS:
        return f"`logit_bias` has more than {MAX_LOGIT_BIAS} entries."
    return None


def _extra_arguments_problem(body: Body) -> str | None:
    """vLLM puts these two and `vllm_xargs` into one dict and reads them as objects: status 500 for others."""
    extra = body.get("vllm_xargs")
    for name in ("kv_transfer_params", "ec_transfer_params"):
        if isinstance(extra, dict) and name in extra:
            return f"`vllm_xargs` has {name}; give `{name}` beside it, as an object."
    return None


def _logprobs_problem(body: Body, limits: RequestLimits, facts: ModelFacts) -> str | None:
    """Log-probs are put together in one step of the event loop when a request ends."""
    output = _logprobs(body.get("logprobs"), body.get("top_logprobs"))
    prompt = _logprobs(body.get("prompt_logprobs"))
    if prompt is None and body.get("echo"):
        prompt = output
    entries = 0
    if prompt is not None:
        entries += (prompt + 1) * _prompt_tokens(body.get("prompt", body.get("messages")), facts)
    if output is not None and not body.get("stream"):
        tokens = max(
            _whole(body.get(name)) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")
        )
        entries += (output + 1) * min(tokens, facts.context_tokens or tokens) * max(1, _whole(body.get("n")))
    if entries > limits.max_logprob_entries:
        return (
            f"The request asks for more than {limits.max_logprob_entries} log-probs (NIBBLE_MAX_LOGPROB_ENTRIES);"
            " ask for fewer, for fewer tokens, or with `stream`."
        )
    return None


def _logprobs(*values: Any) -> int | None:
    """The largest number given; None where log-probs are not asked for. -1: the whole vocabulary."""
    asked = [
        int(v) if isinstance(v, bool) else _whole(v) if v != -1 else 1 << 17
        for v in values
        if v not in (None, False)
    ]
    return max(asked) if asked else None


def _prompt_tokens(prompt: Any, facts: ModelFacts) -> int:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    texts = prompt if isinstance(prompt, list) else [prompt]
    most = facts.context_tokens or 1 << 31
    return sum(
        len(one)
        if isinstance(one, list)
        else min(most, sum(len(text) for text in _texts(one, frozenset())) // CHARS_PER_LOGPROB_TOKEN)
        for one in texts
    )


def _text_problem(body: Body, size: int, limits: RequestLimits, facts: ModelFacts) -> str | None:
    all_chars, one_chars = facts.max_text_chars(limits), facts.max_prompt_chars()
    if size <= min(all_chars, one_chars or all_chars):
        return None
    skipped = _NO_TEXT_KEYS | _MEDIA_KEYS if facts.takes_media else _NO_TEXT_KEYS
    truncated = body.get("truncate_prompt_tokens") is not None
    total = 0
    for text in _texts(body, skipped):
        total += len(text)
        if one_chars is not None and len(text) > one_chars and not truncated:
            return (
                f"A text of {len(text)} characters cannot fit: this model's maximum context length is"
                f" {facts.context_tokens} tokens of at most {facts.longest_token_chars} characters."
            )
        if total > all_chars:
            return f"The text of the request is longer than {all_chars} characters (NIBBLE_MAX_TEXT_CHARS)."
    return None


def _texts(value: Any, skipped: frozenset[str]) -> Iterator[str]:
    """All strings in `value` that are no keys, without what stands under the keys `skipped`."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, dict):
            waiting += [inner for key, inner in one.items() if key not in skipped]


def _chars(value: Any) -> int:
    """Characters of a string or of a list of strings."""
    texts = value if isinstance(value, list) else [value]
    return sum(len(text) for text in texts if isinstance(text, str))


def _whole(value: Any) -> int:
    """A number as vLLM would take it; 0 for what is none (vLLM refuses that itself)."""
    if isinstance(value, str):
        value = value.strip()
        return int(value) if value.isdecimal() and len(value) < 20 else 0
    return int(value) if isinstance(value, int | float) else 0

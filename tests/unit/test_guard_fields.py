"""Values of a request that cost vLLM seconds or status 500 are refused; what is usual passes."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nibble.engine.guard.fields import ModelFacts, field_problem, is_small
from nibble.engine.guard.limits import RequestLimits

COMPLETIONS, CHAT, BATCH = "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch"
LIMITS = RequestLimits.from_environ({})
FACTS = ModelFacts(context_tokens=8192, longest_token_chars=16, takes_media=False)
USER = {"role": "user", "content": "hello"}
TEXT = {"type": "text", "text": "a"}


def problem(
    path: str, facts: ModelFacts = FACTS, limits: RequestLimits = LIMITS, **body: Any
) -> str | None:
    return field_problem(path, body, len(json.dumps(body)), limits, facts)


REFUSED = [
    (COMPLETIONS, {"prompt": "x", "n": 16384}, "sequences"),
    (COMPLETIONS, {"prompt": "x", "n": "16384"}, "sequences"),
    (COMPLETIONS, {"prompt": "x", "n": 16384.0}, "sequences"),
    (COMPLETIONS, {"prompt": "x", "best_of": 5000}, "sequences"),
    (COMPLETIONS, {"prompt": ["x"] * 600, "n": 2}, "sequences"),
    (COMPLETIONS, {"prompt": [[1]] * 600, "n": 2}, "sequences"),
    (COMPLETIONS, {"prompt": "x", "use_beam_search": True, "n": 65}, "beam"),
    (COMPLETIONS, {"prompt": "x", "n": "+16384"}, "sequences"),
    (COMPLETIONS, {"prompt": "x", "n": "16384.0"}, "sequences"),
    (COMPLETIONS, {"prompt": "x", "n": " 16_384 "}, "sequences"),
    (COMPLETIONS, {"prompt": "x", "n": "0" * 30 + "16384"}, "sequences"),
    ("/v1/embeddings", {"input": ["x"] * 2049}, "inputs"),
    ("/v1/rerank", {"query": "x", "documents": ["x"] * 2049}, "inputs"),
    (CHAT, {"messages": [USER] * 20_000}, "messages"),
    ("/v1/messages", {"messages": [USER] * 20_000}, "messages"),
    ("/v1/responses", {"input": [USER] * 20_000}, "messages"),
    ("/v1/chat/completions/batch", {"messages": [[USER] * 100] * 100}, "messages"),
    ("/v1/chat/completions/batch", {"messages": [[USER]] * 100, "n": 100}, "sequences"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 9000}]},
        "messages",
    ),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}] * 3900}]}, "messages"),
    (CHAT, {"messages": [USER], "documents": [{"text": "a"}] * 3000}, "messages"),
    (
        "/v1/messages",
        {"messages": [{"content": [{"type": "tool_result", "content": [TEXT] * 9000}]}]},
        "messages",
    ),
    ("/v1/messages", {"messages": [USER], "system": [TEXT] * 9000}, "messages"),
    (COMPLETIONS, {"prompt": "x", "stop": "y" * 5000}, "stop"),
    (COMPLETIONS, {"prompt": "x", "stop": ["y" * 2000] * 4}, "stop"),
    ("/v1/messages", {"messages": [USER], "stop_sequences": ["y" * 5000]}, "stop_sequences"),
    (COMPLETIONS, {"prompt": "x", "bad_words": ["y"] * 129}, "bad_words"),
    (COMPLETIONS, {"prompt": "x", "bad_words": ["y" * 9000]}, "bad_words"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {str(n): 1 for n in range(2000)}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "vllm_xargs": {"kv_transfer_params": "x"}}, "kv_transfer_params"),
    (COMPLETIONS, {"prompt": "x", "vllm_xargs": {"ec_transfer_params": [1]}}, "ec_transfer_params"),
    (COMPLETIONS, {"prompt": ["word " * 60_000] * 2, "prompt_logprobs": 20}, "log-probs"),
    (COMPLETIONS, {"prompt": [[1] * 8000] * 2, "prompt_logprobs": 20}, "log-probs"),
    (COMPLETIONS, {"prompt": [[1] * 8000] * 2, "echo": True, "logprobs": 20}, "log-probs"),
    (COMPLETIONS, {"prompt": [1] * 8000, "prompt_logprobs": -1}, "log-probs"),
    (COMPLETIONS, {"prompt": [1] * 8000, "prompt_logprobs": "-1"}, "log-probs"),
    (COMPLETIONS, {"prompt": ["word " * 8000] * 50, "prompt_logprobs": 0}, "log-probs"),
    (COMPLETIONS, {"prompt": ["word " * 8000] * 50, "echo": True, "logprobs": 0}, "log-probs"),
    (
        COMPLETIONS,
        {"prompt": "word " * 1200, "n": 128, "echo": True, "logprobs": 7, "max_tokens": 0},
        "log-probs",
    ),
    (COMPLETIONS, {"prompt": "x", "n": 1000, "logprobs": 20}, "log-probs"),
    (COMPLETIONS, {"prompt": "x", "n": 1000, "logprobs": 20, "max_tokens": None}, "log-probs"),
    (COMPLETIONS, {"prompt": ["x"] * 1024, "max_tokens": 16, "logprobs": 20}, "log-probs"),
    (COMPLETIONS, {"prompt": "x", "best_of": 100, "max_tokens": 700, "logprobs": 20}, "log-probs"),
    (
        COMPLETIONS,
        {"prompt": "x", "n": 5, "max_tokens": 1000, "logprobs": 1, "logprob_token_ids": [1] * 128},
        "log-probs",
    ),
    (
        COMPLETIONS,
        {"prompt": "x", "max_tokens": 2000, "n": 10, "logprobs": 20},
        "n 10, prompts 1, tokens of an answer 2000",
    ),
    (
        CHAT,
        {"messages": [USER], "max_completion_tokens": 8000, "logprobs": True, "top_logprobs": 20},
        "log-probs",
    ),
    (CHAT, {"messages": [USER], "n": 128, "logprobs": True, "top_logprobs": 20}, "log-probs"),
    (
        BATCH,
        {"messages": [[USER]] * 1024, "max_tokens": 700, "logprobs": True, "top_logprobs": 20},
        "log-probs",
    ),
    ("/v1/responses", {"input": "x", "max_output_tokens": 8000, "top_logprobs": 20}, "log-probs"),
    (COMPLETIONS, {"prompt": [1] * 8193}, "A prompt of 8193 tokens cannot fit"),
    (COMPLETIONS, {"prompt": [[1], [1] * 8193]}, "A prompt of 8193 tokens cannot fit"),
    (COMPLETIONS, {"prompt": "x" * (8192 * 16 + 1)}, "cannot fit"),
    ("/tokenize", {"prompt": "x" * (10 << 20)}, "cannot fit"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 140_000}]}]},
        "cannot fit",
    ),
    (COMPLETIONS, {"prompt": ["x" * 100_000] * 50}, "NIBBLE_MAX_TEXT_CHARS"),
    (
        COMPLETIONS,
        {"prompt": "x" * (9 << 20), "truncate_prompt_tokens": 5},
        "NIBBLE_MAX_TEXT_CHARS",
    ),
    (COMPLETIONS, {"prompt": "x", "model": "m" * 100_000}, "model"),
    (COMPLETIONS, {"prompt": "x", "user": "m" * 100_000}, "user"),
]

PASSING = [
    (COMPLETIONS, {"prompt": "x", "n": 128}),
    (COMPLETIONS, {"prompt": ["x"] * 1024}),
    (COMPLETIONS, {"prompt": [1] * 8192}),
    (COMPLETIONS, {"prompt": [1] * 9000, "truncate_prompt_tokens": 5}),
    (COMPLETIONS, {"prompt": "x" * 131_072}),
    (COMPLETIONS, {"prompt": "x" * 200_000, "truncate_prompt_tokens": 5}),
    (COMPLETIONS, {"prompt": "word " * 1000, "echo": True, "logprobs": 5, "max_tokens": 0}),
    (CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": 20, "max_tokens": 700}),
    (
        CHAT,
        {
            "messages": [USER],
            "logprobs": True,
            "top_logprobs": 20,
            "max_tokens": 8000,
            "stream": True,
        },
    ),
    (CHAT, {"messages": [USER], "logprobs": False, "top_logprobs": None, "max_tokens": 8000}),
    (CHAT, {"messages": [USER] * 1000, "stop": ["a", "b"], "logit_bias": {"1": -100}, "user": "u"}),
    ("/v1/embeddings", {"input": ["x"] * 2048}),
    ("/v1/embeddings", {"input": [[1]] * 2048}),
    ("/v1/rerank", {"query": "q", "documents": ["x"] * 1200}),
    ("/v1/responses", {"input": [USER] * 2048}),
    (CHAT, {"messages": [USER], "documents": [{"text": "a"}] * 1100}),
    (CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": 5, "max_tokens": 4096}),
    (CHAT, {"messages": [USER], "logprobs": True, "max_tokens": 8192}),
    (CHAT, {"messages": [USER], "n": 8, "logprobs": True, "top_logprobs": 5, "max_tokens": 512}),
    (CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": 20}),
    (COMPLETIONS, {"prompt": [[1] * 1000] * 16, "echo": True, "logprobs": 1, "max_tokens": 1}),
    (COMPLETIONS, {"prompt": [[1] * 8192], "echo": True, "logprobs": 1, "max_tokens": 1}),
    (COMPLETIONS, {"prompt": "x", "n": 16, "logprobs": 1, "max_tokens": 8192}),
    (CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "a"}]}] * 1024}),
    (
        COMPLETIONS,
        {
            "n": None,
            "prompt": None,
            "stop": 7,
            "bad_words": 1,
            "logit_bias": [1],
            "messages": 5,
            "logprobs": "all",
        },
    ),
    (
        COMPLETIONS,
        {
            "n": [1],
            "prompt": {},
            "best_of": {},
            "vllm_xargs": 3,
            "max_tokens": "many",
            "prompt_logprobs": [1],
        },
    ),
]


@pytest.mark.parametrize(("path", "body", "word"), REFUSED, ids=lambda value: str(value)[:50])
def test_is_refused_with_its_reason(path: str, body: dict[str, Any], word: str) -> None:
    reason = problem(path, **body)
    assert reason is not None and word in reason and len(reason) < 300


@pytest.mark.parametrize(("path", "body"), PASSING, ids=lambda value: str(value)[:50])
def test_passes(path: str, body: dict[str, Any]) -> None:
    assert problem(path, **body) is None


def test_images_are_no_text_where_the_model_takes_them() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (9 << 20)}}
    message = {"role": "user", "content": [{"type": "text", "text": "what is it?"}, image]}
    sees = ModelFacts(8192, 16, takes_media=True)
    assert problem(CHAT, sees, messages=[message]) is None
    assert problem(CHAT, FACTS, messages=[message]) == "This model takes no images, audio or video."


def test_limits_are_the_users() -> None:
    more = RequestLimits.from_environ(
        {
            "NIBBLE_MAX_SEQUENCES": "20000",
            "NIBBLE_MAX_TEXT_CHARS": "50000",
            "NIBBLE_MAX_LOGPROB_ENTRIES": "1000",
        }
    )
    assert problem(COMPLETIONS, limits=more, prompt="x", n=16384) is None
    assert "50000" in str(problem(COMPLETIONS, limits=more, prompt="x" * 50_001))
    assert "1000" in str(problem(COMPLETIONS, limits=more, prompt=[1] * 600, prompt_logprobs=1))


def test_facts_come_from_vllms_app() -> None:
    model_config = SimpleNamespace(
        max_model_len=4096, skip_tokenizer_init=False, is_multimodal_model=True
    )
    engine = SimpleNamespace(get_tokenizer=lambda: SimpleNamespace(max_chars_per_token=12))
    state = SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=model_config), engine_client=engine
    )
    assert ModelFacts.of_app(SimpleNamespace(state=state)) == ModelFacts(4096, 12, True)
    assert ModelFacts.of_app(None) == ModelFacts()


@pytest.mark.parametrize(
    ("path", "body", "size", "small"),
    [
        (CHAT, {"messages": [USER], "max_tokens": 5, "temperature": 0}, 200, True),
        (CHAT, {"messages": [USER]}, 2049, False),
        (CHAT, {"messages": [USER], "n": 2}, 200, False),
        (CHAT, {"messages": [USER], "response_format": {}}, 200, False),
        (COMPLETIONS, {"prompt": "x"}, 200, False),
        (BATCH, {"messages": [[USER]] * 30}, 2000, False),
    ],
)
def test_what_passes_without_a_look_at_its_fields(
    path: str, body: dict[str, Any], size: int, small: bool
) -> None:
    assert is_small(path, body, size, LIMITS) == small
    assert not is_small(path, body, size, replace(LIMITS, max_messages=10))

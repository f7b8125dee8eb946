"""Values of a request that cost vLLM seconds or status 500 are refused; what is usual passes."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from nibble.guard.answers import MAX_ERROR_BYTES, with_short_errors
from nibble.guard.fields import ModelFacts, field_problem
from nibble.guard.limits import RequestLimits
from nibble.guard.logprob_fields import answer_limit
from nibble.guard.refusal import Refused
from nibble.guard.request_guard import RequestGuard

COMPLETIONS, CHAT, BATCH = "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch"
LIMITS = RequestLimits.from_environ({})
FACTS = ModelFacts(context_tokens=8192, longest_token_chars=16, takes_media=False)
USER = {"role": "user", "content": "hello"}
TEXT = {"type": "text", "text": "a"}


def problem(path: str, facts: ModelFacts = FACTS, limits: RequestLimits = LIMITS, **body: Any) -> str | None:
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
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 9000}]}, "messages"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}] * 3900}]}, "messages"),
    (CHAT, {"messages": [USER], "documents": [{"text": "a"}] * 3000}, "messages"),
    ("/v1/messages", {"messages": [{"content": [{"type": "tool_result", "content": [TEXT] * 9000}]}]}, "messages"),
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
    (COMPLETIONS, {"prompt": "word " * 1200, "n": 128, "echo": True, "logprobs": 7, "max_tokens": 0}, "log-probs"),
    (COMPLETIONS, {"prompt": "x", "n": 1000, "logprobs": 20}, "log-probs"),
    (COMPLETIONS, {"prompt": "x", "n": 1000, "logprobs": 20, "max_tokens": None}, "log-probs"),
    (COMPLETIONS, {"prompt": ["x"] * 1024, "max_tokens": 16, "logprobs": 20}, "log-probs"),
    (COMPLETIONS, {"prompt": "x", "best_of": 100, "max_tokens": 700, "logprobs": 20}, "log-probs"),
    (COMPLETIONS, {"prompt": "x", "n": 5, "max_tokens": 1000, "logprobs": 1, "logprob_token_ids": [1] * 128}, "log-probs"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 2000, "n": 10, "logprobs": 20}, "n 10, prompts 1, tokens of an answer 2000"),
    (CHAT, {"messages": [USER], "max_completion_tokens": 8000, "logprobs": True, "top_logprobs": 20}, "log-probs"),
    (CHAT, {"messages": [USER], "n": 128, "logprobs": True, "top_logprobs": 20}, "log-probs"),
    (BATCH, {"messages": [[USER]] * 1024, "max_tokens": 700, "logprobs": True, "top_logprobs": 20}, "log-probs"),
    ("/v1/responses", {"input": "x", "max_output_tokens": 8000, "top_logprobs": 20}, "log-probs"),
    (COMPLETIONS, {"prompt": "x" * (8192 * 16 + 1)}, "cannot fit"),
    ("/tokenize", {"prompt": "x" * (10 << 20)}, "cannot fit"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 140_000}]}]}, "cannot fit"),
    (COMPLETIONS, {"prompt": ["x" * 100_000] * 50}, "NIBBLE_MAX_TEXT_CHARS"),
    (COMPLETIONS, {"prompt": "x" * (9 << 20), "truncate_prompt_tokens": 5}, "NIBBLE_MAX_TEXT_CHARS"),
    (COMPLETIONS, {"prompt": "x", "model": "m" * 100_000}, "model"),
    (COMPLETIONS, {"prompt": "x", "user": "m" * 100_000}, "user"),
]  # fmt: skip

PASSING = [
    (COMPLETIONS, {"prompt": "x", "n": 128}),
    (COMPLETIONS, {"prompt": ["x"] * 1024}),
    (COMPLETIONS, {"prompt": [1] * 8192}),
    (COMPLETIONS, {"prompt": "x" * 131_072}),
    (COMPLETIONS, {"prompt": "x" * 200_000, "truncate_prompt_tokens": 5}),
    (COMPLETIONS, {"prompt": "word " * 1000, "echo": True, "logprobs": 5, "max_tokens": 0}),
    (CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": 20, "max_tokens": 700}),
    (CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": 20, "max_tokens": 8000, "stream": True}),
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
    (COMPLETIONS, {"n": None, "prompt": None, "stop": 7, "bad_words": 1, "logit_bias": [1], "messages": 5, "logprobs": "all"}),
    (COMPLETIONS, {"n": [1], "prompt": {}, "best_of": {}, "vllm_xargs": 3, "max_tokens": "many", "prompt_logprobs": [1]}),
]  # fmt: skip


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


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (CHAT, {"top_logprobs": 20, "logprobs": True}, {"max_completion_tokens": 262_144 // 4 // 21}),
        (CHAT, {"logprobs": True, "max_tokens": None, "n": 4}, {"max_completion_tokens": 262_144 // 4 // 4}),
        (
            BATCH,
            {"top_logprobs": 1, "logprobs": True, "messages": [[USER]] * 3},
            {"max_completion_tokens": 10922},
        ),
        ("/v1/responses", {"input": "x", "top_logprobs": 5}, {"max_output_tokens": 10922}),
        (CHAT, {"logprobs": True, "top_logprobs": 20, "max_tokens": 2000}, {}),
        (CHAT, {"logprobs": True, "top_logprobs": 20, "stream": True}, {}),
        (CHAT, {"logprobs": False}, {}),
        (COMPLETIONS, {"prompt": "x", "logprobs": 5}, {}),
        ("/v1/messages", {"logprobs": True}, {}),
    ],
)
def test_an_open_answer_with_log_probs_ends_at_their_limit(
    path: str, body: dict[str, Any], expected: dict[str, int]
) -> None:
    text = json.dumps({"messages": [USER]} | body).encode() + b" \n"
    reached = checked(path, text, JSON)
    assert json.loads(reached) == json.loads(text) | expected
    if not expected:
        assert reached == text
    small = ModelFacts(2048, 16)
    assert answer_limit(path, {"messages": [USER]} | body, LIMITS, small.context_tokens) is None


def test_facts_come_from_vllms_app() -> None:
    model_config = SimpleNamespace(max_model_len=4096, skip_tokenizer_init=False, is_multimodal_model=True)
    engine = SimpleNamespace(get_tokenizer=lambda: SimpleNamespace(max_chars_per_token=12))
    state = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model_config), engine_client=engine)
    assert ModelFacts.of_app(SimpleNamespace(state=state)) == ModelFacts(4096, 12, True)
    assert ModelFacts.of_app(None) == ModelFacts()


def checked(path: str, body: bytes, *headers: tuple[bytes, bytes]) -> bytes:
    """What vLLM would receive."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def run() -> bytes:
        scope = {"headers": [(b"content-length", str(len(body)).encode()), *headers]}
        given = await RequestGuard({}).check(path, scope, receive)
        return (await given())["body"]

    return asyncio.run(run())


JSON = (b"content-type", b"application/json; charset=utf-8")


def test_a_sound_body_reaches_vllm_unchanged() -> None:
    body = b'{ "prompt": "x",\n "n": 2 }'
    assert checked(COMPLETIONS, body, JSON) == body


@pytest.mark.parametrize(
    "content_type", [b"text/plain", b"application/x-www-form-urlencoded", b"", b"multipart/form-data"]
)
def test_other_media_types_are_refused_unread(content_type: bytes) -> None:
    with pytest.raises(Refused) as refused:
        checked(COMPLETIONS, b"{}", (b"content-type", content_type))
    assert refused.value.status == 415


def test_audio_comes_as_a_form() -> None:
    body = b"\x00not json" * 100
    assert (
        checked("/v1/audio/transcriptions", body, (b"content-type", b"multipart/form-data; boundary=x"))
        == body
    )
    with pytest.raises(Refused) as refused:
        checked(
            "/v1/audio/transcriptions",
            b"a=1&" * 1000,
            (b"content-type", b"application/x-www-form-urlencoded"),
        )
    assert refused.value.status == 415


def test_a_request_without_a_body_passes() -> None:
    assert checked("/v1/responses/resp_1/cancel", b"", (b"content-type", b"text/plain")) == b""


def answered(status: int, *pieces: bytes) -> tuple[dict[str, Any], bytes]:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def run() -> None:
        short = with_short_errors(send)
        length = (b"content-length", str(sum(map(len, pieces))).encode())
        await short({"type": "http.response.start", "status": status, "headers": [length, (b"x-a", b"b")]})
        for piece in pieces[:-1]:
            await short({"type": "http.response.body", "body": piece, "more_body": True})
        await short({"type": "http.response.body", "body": pieces[-1]})

    asyncio.run(run())
    body = b"".join(message.get("body", b"") for message in sent)
    assert dict(sent[0]["headers"])[b"content-length"] == str(len(body)).encode()
    assert dict(sent[0]["headers"])[b"x-a"] == b"b"
    return sent[0], body


def test_errors_that_repeat_the_request_are_cut() -> None:
    error = {
        "message": "no such model: " + "é" * (1 << 20),
        "type": "NotFoundError",
        "param": None,
        "code": 404,
    }
    start, body = answered(
        404, *[json.dumps({"error": error}).encode()[n : n + 65536] for n in range(0, 7 << 20, 65536)]
    )
    cut = json.loads(body)["error"]
    assert start["status"] == 404 and len(body) <= 2 * MAX_ERROR_BYTES
    assert cut["message"].startswith("no such model: éé") and cut["message"].endswith("characters cut]")
    assert (cut["type"], cut["param"], cut["code"]) == ("NotFoundError", None, 404)
    assert json.loads(answered(400, b"x" * (1 << 20))[1])["error"]["message"].startswith("xxx")


def test_good_answers_and_short_errors_are_unchanged() -> None:
    assert answered(200, b"a" * (1 << 20), b"b")[1] == b"a" * (1 << 20) + b"b"
    assert answered(400, b'{"error": {"message": "no"}}')[1] == b'{"error": {"message": "no"}}'

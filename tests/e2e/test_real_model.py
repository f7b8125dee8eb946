"""SmolLM2-135M-Instruct, a published model, through real servers on the CPU: its log-probs against
float32 arithmetic on the same NVFP4 numbers, whichever way vLLM computes them.

docs/nvfp4.md has the figures; benchmarks/real_model_quality.py measures what quantizing costs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
from real_model_server import Reference, answers, reference
from real_model_text import held_out

from tests.support.models.real_model import nvfp4
from tests.support.servers.serving import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
BOUND_NATS = 2e-3  # mean divergence from float32 on the same numbers
# vLLM computes prompts of 512 tokens in two pieces
FLAGS = ("--enforce-eager", "--max-logprobs", "256", "--max-num-batched-tokens", "256")
CONTEXT = 8192
SHORT = ("--max-model-len", "2048")
# A small model may otherwise fill its answer with blanks, which JSON allows between values.
COMPACT_JSON = '{"backend": "xgrammar", "disable_any_whitespace": true}'
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 4, 300, 32  # more than a block of 128, and two pieces
Record = Callable[[str, object], None]


class Model(NamedTuple):
    """A checkpoint, float32 arithmetic on it, and texts that it was not calibrated with."""

    folder: Path
    reference: Reference
    rows: list[list[int]]


def load(folder: Path, activations: str) -> Iterator[Model]:
    from transformers import AutoTokenizer

    rows = held_out(AutoTokenizer.from_pretrained(folder))
    with reference(folder, activations) as float32:
        yield Model(folder, float32, rows)


@pytest.fixture(scope="module")
def w4a16(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp("w4a16") / "model"
    yield from load(nvfp4(folder, "--four-over-six"), "bf16")


def served(folder: Path, model: Model, *words: str) -> Iterator[Server]:
    server = Server(folder, ["serve", str(model.folder), *FLAGS, *words])
    try:
        yield server.wait_until_ready()
    finally:
        server.end()


@pytest.fixture(scope="module")
def server(w4a16: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """For the tests of W4A16 with a BF16 cache."""
    words = ["--max-model-len", str(CONTEXT), "--structured-outputs-config", COMPACT_JSON]
    yield from served(tmp_path_factory.mktemp("server"), w4a16, *words)


def asking(server: Server) -> Callable[[str, Any], tuple[int, Any]]:
    return lambda path, body: server.ask(path, body, timeout_s=300)


def check_prompts(server: Server, model: Model, record: Record) -> None:
    """The log-probs of every token of the rows; `record` gets what was measured."""
    found = model.reference.compare_prompts(asking(server), model.rows)
    record("measured", found)
    assert found.tokens > 4000
    assert found.mean_kl_nats < BOUND_NATS, found


# --- every token of a text ------------------------------------------------------------------------


def test_4000_held_out_tokens_in_w4a16(
    server: Server, w4a16: Model, record_property: Record
) -> None:
    check_prompts(server, w4a16, record_property)


# --- answers --------------------------------------------------------------------------------------


def check_answers(server: Server, model: Model, record: Record, **more: Any) -> int:
    """The log-probs of what the server says after the beginnings of rows; how many tokens that
    were.
    """
    total, divergence = 0, 0.0
    for ids in model.rows[:PROMPTS]:
        prompt = ids[:PROMPT_TOKENS]
        found = answers(asking(server), prompt, ANSWER_TOKENS, **more)
        compared = model.reference.compare_answers(prompt, found)
        total += compared.tokens
        divergence += compared.tokens * compared.mean_kl_nats
    record("mean_kl_nats", divergence / total)
    assert divergence / total < BOUND_NATS
    return total


def test_answers_to_a_new_and_to_a_cached_prompt(
    server: Server, w4a16: Model, record_property: Record
) -> None:
    check_answers(server, w4a16, record_property)
    before = server.metric("prefix_cache_hits_total")
    check_answers(server, w4a16, record_property)
    hits = server.metric("prefix_cache_hits_total") - before
    assert hits >= PROMPTS * 256, hits  # whole blocks


def test_four_sampled_answers_at_a_time(
    server: Server, w4a16: Model, record_property: Record
) -> None:
    """Seeded, with prompts in pieces, which end vLLM 0.32 without nibble's plugin."""
    tokens = check_answers(server, w4a16, record_property, n=4, temperature=1.0, seed=5)
    assert tokens == 4 * ANSWER_TOKENS * PROMPTS


def test_answers_with_ngram_drafts(w4a16: Model, tmp_path: Path, record_property: Record) -> None:
    for server in served(tmp_path, w4a16, *SHORT, "--speculative-config", NGRAM):
        check_answers(server, w4a16, record_property)
        accepted = server.metric("spec_decode_num_accepted_tokens_total")
        record_property("accepted drafts", accepted)
        assert accepted > 0


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
CHAT = "/v1/chat/completions"


def by_schema(server: Server, subject: str) -> str:
    body = {
        "model": "default",
        "messages": [SYSTEM, {"role": "user", "content": f"Describe a {subject} in JSON."}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "thing", "schema": SCHEMA},
        },
        "temperature": 0.7,
        "seed": len(subject),
        "max_tokens": 300,
    }
    status, answer = asking(server)(CHAT, body)
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"]


def test_fifty_of_fifty_answers_are_valid_by_their_schema(server: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda subject: by_schema(server, subject), SUBJECTS))
    assert len(found) == 50
    for text in found:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(found)) > 25  # about their subjects, not one text


def test_a_system_prompt_is_in_the_prompt(server: Server) -> None:
    """The model's template puts a default text where there is none."""

    def prompt(*messages: dict[str, str]) -> str:
        status, found = asking(server)(
            "/tokenize", {"model": "default", "messages": list(messages)}
        )
        assert status == 200, found
        status, text = asking(server)(
            "/detokenize", {"model": "default", "tokens": found["tokens"]}
        )
        assert status == 200, text
        return text["prompt"]

    user = {"role": "user", "content": "Hello"}
    ends = "<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert prompt(SYSTEM, user) == f"<|im_start|>system\n{SYSTEM['content']}{ends}"
    assert "SmolLM" in prompt(user)

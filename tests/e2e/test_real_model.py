"""SmolLM2-135M-Instruct, a published model, through real servers on the CPU: its log-probs against
float32 arithmetic on the same NVFP4 numbers, whichever way vLLM computes them.

docs/nvfp4.md states the bounds; benchmarks/real_model_quality.py measures what they leave out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from real_model import CALIBRATION, nvfp4
from real_model_server import Reference, answers, reference
from real_model_text import held_out
from serving import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
# Mean divergence in nats from float32 on the same numbers, by checkpoint and type of the KV cache.
BOUNDS_NATS = {("W4A16", "auto"): 2e-3, ("W4A4", "auto"): 0.1, ("W4A16", "fp8"): 0.02}
# vLLM computes prompts of 512 tokens in two pieces
FLAGS = ("--enforce-eager", "--max-logprobs", "256", "--max-num-batched-tokens", "256")
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'
PROMPT_TOKENS, ANSWER_TOKENS = 96, 32


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


@pytest.fixture(scope="module")
def w4a4(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp("w4a4") / "model"
    words = ["--four-over-six", "--activations", "fp4", "--calibrate", str(CALIBRATION)]
    yield from load(nvfp4(folder, *words), "fp4")


def served(folder: Path, model: Model, *words: str) -> Iterator[Server]:
    server = Server(folder, ["serve", str(model.folder), *FLAGS, *words])
    try:
        yield server.wait_until_ready()
    finally:
        server.end()


@pytest.fixture(scope="module")
def server(w4a16: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """For the tests of W4A16 with a BF16 cache."""
    yield from served(tmp_path_factory.mktemp("server"), w4a16, "--max-model-len", "2048")


def asking(server: Server):
    return lambda path, body: server.ask(path, body, timeout_s=300)


# --- every token of a text ------------------------------------------------------------------------


def test_4000_held_out_tokens_in_w4a16(server: Server, w4a16: Model) -> None:
    found = w4a16.reference.compare_prompts(asking(server), w4a16.rows)
    assert found.tokens > 4000
    assert found.mean_kl_nats < BOUNDS_NATS["W4A16", "auto"], found
    assert found.same_top_token > 0.95, found


def test_held_out_tokens_in_w4a4(w4a4: Model, tmp_path: Path) -> None:
    for server in served(tmp_path, w4a4, "--max-model-len", "2048"):
        found = w4a4.reference.compare_prompts(asking(server), w4a4.rows)
        assert found.mean_kl_nats < BOUNDS_NATS["W4A4", "auto"], found


def test_held_out_tokens_with_an_fp8_cache(w4a16: Model, tmp_path: Path) -> None:
    words = ("--max-model-len", "2048", "--kv-cache-dtype", "fp8")
    for server in served(tmp_path, w4a16, *words):
        found = w4a16.reference.compare_prompts(asking(server), w4a16.rows)
        assert found.mean_kl_nats < BOUNDS_NATS["W4A16", "fp8"], found


# --- answers --------------------------------------------------------------------------------------


def check_answers(server: Server, model: Model, **more: object) -> int:
    """The log-probs of what the server says after the rows; how many tokens those were."""
    total, divergence = 0, 0.0
    for ids in model.rows:
        prompt = ids[:PROMPT_TOKENS]
        found = answers(asking(server), prompt, ANSWER_TOKENS, **more)
        compared = model.reference.compare_answers(prompt, found)
        total += compared.tokens
        divergence += compared.tokens * compared.mean_kl_nats
    assert divergence / total < BOUNDS_NATS["W4A16", "auto"], divergence / total
    return total


def test_answers_to_a_new_and_to_a_cached_prompt(server: Server, w4a16: Model) -> None:
    check_answers(server, w4a16)
    before = server.metric("prefix_cache_hits_total")
    check_answers(server, w4a16)
    blocks = len(w4a16.rows) * (PROMPT_TOKENS - 1) // 32 * 32
    assert server.metric("prefix_cache_hits_total") - before >= blocks * 0.9


def test_four_sampled_answers_at_a_time(server: Server, w4a16: Model) -> None:
    tokens = check_answers(server, w4a16, n=4, temperature=1.0, seed=5)
    assert tokens == 4 * ANSWER_TOKENS * len(w4a16.rows)


def test_answers_with_ngram_drafts(w4a16: Model, tmp_path: Path) -> None:
    words = ("--max-model-len", "2048", "--speculative-config", NGRAM)
    for server in served(tmp_path, w4a16, *words):
        check_answers(server, w4a16)
        assert server.metric("spec_decode_num_accepted_tokens_total") > 0

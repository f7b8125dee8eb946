"""SmolLM2-135M-Instruct, a published model, through real servers on the CPU: its log-probs against
float32 arithmetic on the same NVFP4 numbers, whichever way vLLM computes them.

docs/nvfp4.md has the figures; benchmarks/real_model_quality.py measures what quantizing costs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from real_model_server import Reference, answers, reference
from real_model_text import held_out, module_docstrings

from tests.support.models.real_model import nvfp4
from tests.support.paths import ROOT
from tests.support.servers.serving import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
BOUND_NATS = 2e-3  # mean divergence from float32 on the same numbers, W4A16 with a BF16 cache
# 0.24 measured; transformers in BF16 has 0.26. A rounding decides an activation's FP4 code where it
# is near a midpoint, so another order of additions gives other answers.
W4A4_BOUND_NATS = 0.35
# 0.026 measured, with the error of an FP8 cache without scales: the reference's cache is float32.
FP8_CACHE_BOUND_NATS = 0.04
# vLLM computes prompts of 512 tokens in two pieces
FLAGS = ("--enforce-eager", "--max-logprobs", "256", "--max-num-batched-tokens", "256")
# Set on a GPU (benchmarks/offline_gpu/run_real_model.sh)
KERNEL = {name: os.environ[name] for name in ("NIBBLE_LINEAR_KERNEL",) if name in os.environ}
CONTEXT = 8192
SHORT = ("--max-model-len", "2048")
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
    server = Server(folder, ["serve", str(model.folder), *FLAGS, *words], **KERNEL)
    try:
        yield server.wait_until_ready()
    finally:
        server.end()


@pytest.fixture(scope="module")
def w4a4(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp("w4a4") / "model"
    texts = ROOT / "models" / "demo_other_prompts.txt"
    words = ("--four-over-six", "--activations", "fp4", "--calibrate", str(texts))
    yield from load(nvfp4(folder, *words), "fp4")


@pytest.fixture(scope="module")
def server(w4a16: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """For the tests of W4A16 with a BF16 cache."""
    words = ["--max-model-len", str(CONTEXT)]
    yield from served(tmp_path_factory.mktemp("server"), w4a16, *words)


def asking(server: Server) -> Callable[[str, Any], tuple[int, Any]]:
    return lambda path, body: server.ask(path, body, timeout_s=300)


def check_prompts(
    server: Server, model: Model, record: Record, bound_nats: float = BOUND_NATS
) -> None:
    """The log-probs of every token of the rows; `record` gets what was measured."""
    found = model.reference.compare_prompts(asking(server), model.rows)
    record("measured", found)
    assert found.tokens > 4000
    assert found.mean_kl_nats < bound_nats, found


# --- every token of a text ------------------------------------------------------------------------


def test_4000_held_out_tokens_in_w4a16(
    server: Server, w4a16: Model, record_property: Record
) -> None:
    check_prompts(server, w4a16, record_property)


def test_held_out_tokens_in_w4a4(w4a4: Model, tmp_path: Path, record_property: Record) -> None:
    for server in served(tmp_path, w4a4, *SHORT):
        check_prompts(server, w4a4, record_property, W4A4_BOUND_NATS)


def test_held_out_tokens_with_an_fp8_cache(
    w4a16: Model, tmp_path: Path, record_property: Record
) -> None:
    for server in served(tmp_path, w4a16, *SHORT, "--kv-cache-dtype", "fp8"):
        check_prompts(server, w4a16, record_property, FP8_CACHE_BOUND_NATS)


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


def test_an_answer_at_the_end_of_8k_tokens(
    server: Server, w4a16: Model, record_property: Record
) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(w4a16.folder)
    prompt = tokenizer("\n\n".join(module_docstrings())).input_ids[: CONTEXT - ANSWER_TOKENS]
    assert len(prompt) == CONTEXT - ANSWER_TOKENS
    found = answers(asking(server), prompt, ANSWER_TOKENS)
    compared = w4a16.reference.compare_answers(prompt, found)
    record_property("measured", compared)
    assert compared.tokens == ANSWER_TOKENS
    assert compared.mean_kl_nats < BOUND_NATS, compared

"""SmolLM2-135M-Instruct, a published model, through real servers: its log-probs against
float32 arithmetic on the same NVFP4 numbers, whichever way vLLM computes them.

docs/nvfp4.md has the figures; benchmarks/real_model_quality.py measures what quantizing costs. The
tests marked gpu, and the others with NIBBLE_LINEAR_KERNEL, are what
benchmarks/offline_gpu/run_real_model.sh runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from real_model_server import Reference, answers, reference
from real_model_text import held_out, module_docstrings

from nibble.hub.packaged import SMOLLM2
from nibble.serve.endpoint import Endpoint
from tests.support.models.real_model import nvfp4
from tests.support.paths import ROOT
from tests.support.servers.serving import START_TIMEOUT_S, Server, clean_environ, free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
BOUND_NATS = 2e-3  # mean divergence from float32 on the same numbers, W4A16 with a BF16 cache
# 0.24 measured; transformers in BF16 has 0.26. A rounding decides an activation's FP4 code where it
# is near a midpoint, so another order of additions gives other answers.
W4A4_BOUND_NATS = 0.35
# 0.026 measured, with the error of an FP8 cache without scales: the reference has float32. On
# Hopper, FlashAttention 3 also rounds queries to FP8.
FP8_CACHE_BOUND_NATS = 0.1 if torch.cuda.is_available() else 0.04
# vLLM computes prompts of 512 tokens in two pieces
FLAGS = ("--enforce-eager", "--max-logprobs", "256", "--max-num-batched-tokens", "256")
# Set on a GPU (benchmarks/offline_gpu/run_real_model.sh)
KERNEL = {name: os.environ[name] for name in ("NIBBLE_LINEAR_KERNEL",) if name in os.environ}
CONTEXT, LAYERS = 8192, 30
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
        yield check_kernel(server.wait_until_ready())
    finally:
        server.end()


def check_kernel(server: Server) -> Server:
    """NIBBLE_LINEAR_KERNEL is what runs, in each of the model's layers."""
    ran = server.wait_for_status()["assertion"]["ran"][0]["linear"]
    assert sum(ran.values()) == 4 * LAYERS, ran  # vLLM fuses q, k and v, and gate and up
    if KERNEL:
        ours = KERNEL["NIBBLE_LINEAR_KERNEL"] == "nibble"
        assert all(("NibbleNvFp4LinearKernel" in name) == ours for name in ran), ran
    return server


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


def test_held_out_tokens_with_scales_of_an_fp8_cache(
    tmp_path: Path, record_property: Record
) -> None:
    """Declared and measured by `nibble convert --kv-cache fp8`."""
    words = ("--four-over-six", "--kv-cache", "fp8")
    for model in load(nvfp4(tmp_path / "model", *words), "bf16"):
        for server in served(tmp_path / "server", model, *SHORT):
            assert "fp8" in server.log()
            check_prompts(server, model, record_property, FP8_CACHE_BOUND_NATS)


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


# --- on a GPU -------------------------------------------------------------------------------------


class VllmAlone:
    """`vllm serve` with nibble's plugin. nibble's server answers 404 to requests that put it to
    sleep (docs/security.md).
    """

    def __init__(self, folder: Path, model: Path) -> None:
        self._endpoint, self._log = Endpoint("127.0.0.1", free_port()), folder / "log"
        plugin = {"nibble": {"linear_kernel": KERNEL.get("NIBBLE_LINEAR_KERNEL", "vllm")}}
        words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        words += ["--served-model-name", "default", "--port", str(self._endpoint.port)]
        words += ["--enable-sleep-mode", "--additional-config", json.dumps(plugin), *FLAGS, *SHORT]
        words += ["--gpu-memory-utilization", os.environ.get("GPU_MEMORY_UTIL", "0.2")]
        words += ["--kv-cache-memory-bytes", str(1 << 30)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                words,
                env=clean_environ(folder, VLLM_SERVER_DEV_MODE="1"),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        status, text = self._endpoint.call(path, body, timeout_s=300)
        return status, json.loads(text) if text else None

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError):
                if self._endpoint.call("/health", timeout_s=5)[0] == 200:
                    return
            assert self.process.poll() is None, self._log.read_text(errors="replace")[-5000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.mark.gpu
def test_held_out_tokens_after_sleep_and_wake(
    w4a16: Model, tmp_path: Path, record_property: Record
) -> None:
    """Weights go to the host's memory and come back."""
    server = VllmAlone(tmp_path, w4a16.folder)
    try:
        server.wait_until_ready()
        before = w4a16.reference.compare_prompts(server.ask, w4a16.rows)
        record_property("before", before)
        assert server.ask("/sleep?level=1", {})[0] == 200
        assert server.ask("/is_sleeping")[1] == {"is_sleeping": True}
        assert server.ask("/wake_up", {})[0] == 200
        after = w4a16.reference.compare_prompts(server.ask, w4a16.rows)
        record_property("after", after)
    finally:
        server.end()
    assert before.tokens > 4000
    assert max(before.mean_kl_nats, after.mean_kl_nats) < BOUND_NATS, (before, after)
    assert abs(after.mean_kl_nats - before.mean_kl_nats) < BOUND_NATS / 20, (before, after)


@pytest.mark.gpu
def test_recorded_answers_on_a_gpu(w4a16: Model, tmp_path: Path, record_property: Record) -> None:
    """Recorded on a CPU; with nibble's flags, so with CUDA graphs."""
    rows = (ROOT / "models/packaged" / SMOLLM2.id / "questions.jsonl").read_text().splitlines()
    recorded = {row["question"]: row["answer"] for row in map(json.loads, rows)}
    environ = {"NIBBLE_CANARY": "strict", "MAX_NUM_SEQS": "16", **KERNEL}
    server = Server(tmp_path, ["serve", str(w4a16.folder)], **environ)
    try:
        status = check_kernel(server.wait_until_ready()).wait_for_status()
        findings = {one["mechanism"]: one["verdict"] for one in status["canary"]["findings"]}
        record_property("canary", findings)
        answers = {}
        for question in recorded:
            messages = [{"role": "user", "content": question}]
            body = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": 32}
            code, found = server.ask("/v1/chat/completions", body)
            assert code == 200, found
            answers[question] = found["choices"][0]["message"]["content"]
    finally:
        server.end()
    record_property("equal answers", sum(answers[each] == recorded[each] for each in recorded))
    assert answers == recorded
    assert (findings["layers"], findings["references"]) == ("passed", "passed")

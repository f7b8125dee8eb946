"""CloverLM on a GPU: against the formula, CUDA graphs against one kernel after the other, batches, and two GPUs against one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cloverlm_models as models
import pytest
import torch
from test_cloverlm_in_vllm import (
    BF16_MAX,
    BF16_RMS,
    PROMPTS,
    QUARTET2,
    SHAPE,
    SPLIT,
    TWO_PROCESSES,
    by_mode,
    expected,
    in_vllm,
    largest,
    quantized,
    request,
    rms,
)

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]
GRAPHS = {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
WAYS = {
    "bf16": ({}, {}),
    "w4a16": (QUARTET2, {"nvfp4_activations": "bf16"}),
    "token": (QUARTET2, {}),
    "batch-pow2": (QUARTET2, {"act_scale_mode": "batch-pow2"}),
    "batch": (QUARTET2, {"act_scale_mode": "batch"}),
}

# vLLM's own attention and products that add in one order whatever the batch is.
INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}


@pytest.fixture(scope="module")
def answers(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Any]:
    """By way and whether graphs were used; 3 prompts, so that graphs of 4 have a row that is padding."""
    folder = tmp_path_factory.mktemp("cloverlm")
    model = models.write_bf16(folder / "model", SHAPE)
    requests = {
        (way, graphs): request(model, options | (GRAPHS if graphs else {}), PROMPTS[:3], **nibble)
        | {"tokens": 8}
        for way, (options, nibble) in WAYS.items()
        for graphs in (False, True)
    }
    return dict(zip(requests, in_vllm(installed, folder, list(requests.values())), strict=True))


@pytest.mark.parametrize("way", list(WAYS))
def test_cuda_graphs_change_nothing(way: str, answers: dict[tuple[str, bool], Any]) -> None:
    assert largest(answers[way, True][0], answers[way, False][0]) == 0.0


@pytest.mark.parametrize("way", ["bf16", "w4a16"])
def test_the_formulas_logits_come_out(way: str, kernels: Any, answers: dict[tuple[str, bool], Any]) -> None:
    linear = None if way == "bf16" else lambda tensors: quantized(tensors, None)
    found = [y[: len(p)] for y, p in zip(answers[way, True][0], PROMPTS[:3], strict=True)]
    wanted = expected(SHAPE, PROMPTS[:3], linear)
    assert largest(found, wanted) < BF16_MAX and rms(found, wanted) < BF16_RMS


@pytest.fixture(scope="module")
def alone_and_batched(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The first prompt's answers alone and with others, by way, from a vLLM whose other operators do not depend on the batch."""
    folder = tmp_path_factory.mktemp("batches")
    model = models.write_bf16(folder / "model", SHAPE)
    ways = [way for way in WAYS if way not in ("bf16", "w4a16")]
    requests = [
        request(model, WAYS[way][0] | GRAPHS, PROMPTS[:1], PROMPTS, **WAYS[way][1]) | {"tokens": 8}
        for way in ways
    ]
    return dict(zip(ways, in_vllm(installed, folder, requests, **INVARIANT), strict=True))


@pytest.mark.parametrize("way", ["token", "batch-pow2"])
def test_who_else_is_in_the_batch_changes_no_bit(way: str, alone_and_batched: dict[str, Any]) -> None:
    alone, batched = alone_and_batched[way]
    assert largest(alone, batched[:1]) == 0.0


def test_with_the_authors_scale_it_changes_the_answer(alone_and_batched: dict[str, Any]) -> None:
    alone, batched = alone_and_batched["batch"]
    assert largest(alone, batched[:1]) > 0.1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("way", ["bf16", "w4a16", "token"])
def test_two_gpus_answer_as_one(way: str, installed: Path, kernels: Any, tmp_path: Path) -> None:
    """Both within the formula's bounds: BF16 adds the ranks' parts in another order than one GPU does."""
    model = models.write_bf16(tmp_path / "model", SPLIT)
    options, nibble = WAYS[way]
    both = [
        request(model, options | GRAPHS | {"tensor_parallel_size": ranks}, PROMPTS[:3], **nibble)
        for ranks in (1, 2)
    ]
    ((one,),) = in_vllm(installed, tmp_path, both[:1])
    ((two,),) = in_vllm(installed, tmp_path, both[1:], **TWO_PROCESSES)
    modes: dict[str, Any] = {
        "bf16": None,
        "w4a16": lambda tensors: quantized(tensors, None),
        "token": lambda tensors: quantized(tensors, by_mode("token")),
    }
    wanted = expected(SPLIT, PROMPTS[:3], modes[way])
    bound = rms(wanted, expected(SPLIT, PROMPTS[:3])) if way == "token" else BF16_RMS
    assert rms(one, wanted) < bound and rms(two, wanted) < bound
    if way != "token":  # a code on a tie can fall the other way
        assert largest(one, two) < BF16_MAX and rms(one, two) < BF16_RMS

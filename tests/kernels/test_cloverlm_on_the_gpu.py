"""CloverLM on a GPU: against the formula, and CUDA graphs against one kernel after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cloverlm_models as models
import pytest
from test_cloverlm_in_vllm import (
    BF16_MAX,
    BF16_RMS,
    PROMPTS,
    QUARTET2,
    SHAPE,
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

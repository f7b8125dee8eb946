"""The output head in NVFP4 through a real vLLM on the CPU: loaded where the model class passes
no quant_config, or made so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.changes import OPERATORS
from tests.support.in_vllm import vllm_logprobs
from tests.support.models.nvfp4_head import PROMPT, expected_logprobs, write

pytestmark = [pytest.mark.vllm, pytest.mark.when_changed(*OPERATORS)]
BF16_ROUNDING = 0.05  # of a model in BF16 beside one in float32, logits up to about 10


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model for each kind of head."""
    folder = tmp_path_factory.mktemp("heads")
    for head in ("nvfp4", "bf16"):
        write(folder / head, head)
    return folder


@pytest.fixture(scope="module")
def found(models: Path) -> dict[str, Any]:
    """Log-probabilities: of the NVFP4 head, of a BF16 one made NVFP4, and of that as it is; and
    what vLLM printed.
    """
    made = {"additional_config": {"nibble": {"quantize_lm_head": "nvfp4"}}}
    jobs: dict[str, vllm_logprobs.Job] = {
        "loaded": (str(models / "nvfp4"), {}, PROMPT),
        "made": (str(models / "bf16"), made, PROMPT),
        "bf16": (str(models / "bf16"), {}, PROMPT),
    }
    results, done = vllm_logprobs.run(list(jobs.values()), models)
    return dict(zip(jobs, results, strict=True)) | {"log": done.stdout + done.stderr}


def differs(found: dict[str, Any], model: str, head: str) -> float:
    """Largest difference from float32 arithmetic with that head."""
    return float((torch.tensor(found[model]) - expected_logprobs(head)).abs().max())


def test_a_model_class_that_passes_no_quant_config_loads_a_quantized_head(
    found: dict[str, Any],
) -> None:
    assert differs(found, "loaded", "nvfp4") < BF16_ROUNDING


@pytest.mark.slow
def test_vllm_alone_does_not_load_it(models: Path) -> None:
    (refused,), done = vllm_logprobs.run(
        [(str(models / "nvfp4"), {}, PROMPT)], models, VLLM_PLUGINS=""
    )
    assert isinstance(refused, str)
    assert "lm_head.weight" in done.stdout + done.stderr


def test_a_bf16_head_is_quantized_at_load_and_answers_as_that_head_should(
    found: dict[str, Any],
) -> None:
    assert "lm_head quantized to NVFP4 at load" in found["log"]
    assert differs(found, "made", "nvfp4") < BF16_ROUNDING
    assert differs(found, "made", "bf16") > BF16_ROUNDING


def test_a_bf16_head_stays_as_it_is_without_the_option(found: dict[str, Any]) -> None:
    assert differs(found, "bf16", "bf16") < BF16_ROUNDING

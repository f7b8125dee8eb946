"""Experts in NVFP4 through a real vLLM on its CPU platform, with gate and up of unequal global
scales.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.changes import OPERATORS
from tests.support.in_vllm import vllm_logprobs
from tests.support.models.generated_nvfp4 import Shape, write_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.when_changed(*OPERATORS)]
SHAPE = Shape(experts=4)
PROMPT = [5, 17, 33, 101, 120, 7, 9, 11, 64, 80, 2]
BF16_ROUNDING = 0.1  # of two ways to add up the same experts in BF16, logits up to about 10
FORMS = ("modelopt", "compressed-tensors")
SCALES = ("up_proj.weight_scale_2", "down_proj.input_scale", "gate_proj.weight_scale")


def without(folder: Path, scale: str) -> Path:
    """The ModelOpt model with one tensor less."""
    write_checkpoint(folder, SHAPE, "modelopt", w4a4=True)
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.layers.1.mlp.experts.2.{scale}"]
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def found(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What vLLM makes of each model: log-probabilities, or the error. "bf16" has the same
    weights, by vLLM's own experts.
    """
    here = tmp_path_factory.mktemp("experts")
    models = {"bf16": write_checkpoint(here / "bf16", SHAPE, "bf16")}
    for form in FORMS:
        models[form] = write_checkpoint(here / form, SHAPE, form)
        models[f"{form} w4a4"] = write_checkpoint(here / f"{form} w4a4", SHAPE, form, w4a4=True)
    models |= {f"without {scale}": without(here / scale, scale) for scale in SCALES}
    jobs: list[vllm_logprobs.Job] = [(str(folder), {}, PROMPT) for folder in models.values()]
    results, _ = vllm_logprobs.run(jobs, here, PYTHONPATH=str(installed))
    return dict(zip(models, results, strict=True))


def largest_difference(found: dict[str, Any], model: str) -> float:
    """From the BF16 model."""
    return float((torch.tensor(found[model]) - torch.tensor(found["bf16"])).abs().max())


@pytest.mark.parametrize("form", FORMS)
def test_they_answer_as_the_same_weights_in_bf16(form: str, found: dict[str, Any]) -> None:
    assert largest_difference(found, form) < BF16_ROUNDING


@pytest.mark.parametrize("form", FORMS)
def test_quantized_activations_change_the_answer_a_little(form: str, found: dict[str, Any]) -> None:
    assert BF16_ROUNDING < largest_difference(found, f"{form} w4a4") < 1


@pytest.mark.parametrize("missing", SCALES)
def test_a_scale_that_the_checkpoint_lacks_is_named(missing: str, found: dict[str, Any]) -> None:
    """vLLM would compute with what lay in memory."""
    weight = "w2" if "down" in missing else "w13"
    name = f"model.layers.1.mlp.experts.{weight}_{missing.partition('.')[2]}"
    assert f"{name} was not loaded" in found[f"without {missing}"]

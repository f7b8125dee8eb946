"""W4A4 checkpoints in vLLM with nibble's kernels for FP4 activations, on the CPU platform as a GPU
with FP4 products: single layers against vLLM's formula in float64, and whole models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.test_gpu_kernel_in_vllm import OPTIONS, PROMPT, anywhere
from tests.support.changes import OPERATORS
from tests.support.in_vllm import vllm_logprobs
from tests.support.in_vllm.findings import findings
from tests.support.models.generated_nvfp4 import Form, Shape, write_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.when_changed(*OPERATORS)]
FLIPPED_CODES = 0.2  # nats on average over the tokens
Case = dict[str, Any]
OURS = "NibbleNvFp4W4A4LinearKernel"
LIMIT = 0.004  # one rounding to BF16, or two
UNEQUAL = {"weight_scales": [0.01, 0.013]}  # whose ratio no block scale can take: column factors
FORMS: tuple[Form, ...] = ("modelopt", "compressed-tensors")
SERVED: list[Case] = [
    *({"form": form, "rows": rows} for form in FORMS for rows in (1, 17, 600)),
    *({"form": form, "rows": 5, "bias": True, **UNEQUAL} for form in FORMS),
    {"form": "modelopt", "rows": 5, "input_scales": [0.004, 0.002]},
    {"form": "compressed-tensors", "rows": 5, "input_scales": [0.004, 0.002]},
    {"form": "modelopt", "rows": 20, "compiled": True, "bias": True, **UNEQUAL},
    {"form": "compressed-tensors", "rows": 20, "compiled": True, **UNEQUAL},
    {"form": "modelopt", "rows": 20, "widths": [32, 32], "silu_mul": True, **UNEQUAL},
    {"form": "modelopt", "rows": 20, "residual": True, "bias": True},
    {"form": "modelopt", "rows": 20, "widths": [32, 32], "silu_mul": True, "residual": True},
    {"form": "modelopt", "rows": 5, "dtype": "float16"},
]
KEPT_IN_BF16: list[Case] = [
    {"form": "modelopt", "options": {"nvfp4_activations": "bf16"}},
    {"form": "compressed-tensors", "options": {"nvfp4_activations": "bf16"}},
    {"form": "modelopt", "capability": 9},
]
NOT_POSITIVE = "has an input scale that is not a positive number"
REFUSED: list[tuple[Case, str]] = [
    ({"form": "modelopt", "columns": 48}, "has 48 columns"),
    ({"form": "modelopt", "widths": [20, 24]}, "a multiple of 8 rows; got 44"),
    ({"form": "modelopt", "dtype": "float32"}, "in torch.float32 is not supported"),
    ({"form": "modelopt", "bad": "block scale"}, "weight_scale was not loaded, or is NaN"),
    ({"form": "modelopt", "input_scales": [0, 0]}, NOT_POSITIVE),
    ({"form": "modelopt", "input_scales": [-0.1, -0.1]}, NOT_POSITIVE),
    ({"form": "compressed-tensors", "input_scales": [0, 0.1]}, NOT_POSITIVE),
    ({"form": "modelopt", "input_scales": [None, 0.1]}, "input_scale was not loaded"),
    (
        {"form": "compressed-tensors", "input_scales": [0.1, None]},
        "input_global_scale was not loaded",
    ),
    ({"form": "modelopt", "invariant": "1"}, "VLLM_BATCH_INVARIANT rules out"),
    ({"form": "compressed-tensors", "backend": "marlin"}, "--linear-backend marlin and nibble's"),
    ({"form": "modelopt", "options": {"sparse_fp4": "on"}}, "sparse_fp4 leaves activations"),
    ({"form": "modelopt", "capability": 10}, "leaves activations in BF16, and this GPU"),
]


@pytest.fixture(scope="module")
def found(installed: Any) -> dict[str, Any]:
    """The class and error of each case, or what refused it."""
    cases = [*SERVED, *KEPT_IN_BF16, *(case for case, _ in REFUSED)]
    results = findings(installed, ["-m", "tests.support.in_vllm.w4a4_layers"], cases)
    return {str(case): result for case, result in zip(cases, results, strict=True)}


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_a_layer_computes_vllms_formula(found: dict[str, Any], case: Case) -> None:
    """Of shards with unequal scales too: one input scale, vLLM's, and exact weights."""
    name, error = found[str(case)]
    assert name == OURS and error < LIMIT


@pytest.mark.parametrize("case", KEPT_IN_BF16, ids=str)
def test_other_layers_keep_activations_in_bf16(found: dict[str, Any], case: Case) -> None:
    """Their error against the formula of FP4 activations shows that it tells both apart."""
    name, error = found[str(case)]
    assert name == "NibbleNvFp4LinearKernel" and error > 10 * LIMIT


@pytest.mark.parametrize(("case", "why"), REFUSED, ids=str)
def test_what_the_kernel_does_not_take_is_refused_by_name(
    found: dict[str, Any], case: Case, why: str
) -> None:
    assert why in str(found[str(case)])


@pytest.mark.gpu
def test_on_a_gpu_layers_compute_vllms_formula(installed: Any) -> None:
    """Emulated where the GPU has no FP4 products; from CUDA graphs too."""
    graphed = [{"form": "modelopt", "rows": rows, "graphed": True} for rows in (1, 17, 600)]
    words = ["-m", "tests.support.in_vllm.w4a4_layers", "cuda"]
    cases = [*SERVED, *graphed, {"form": "modelopt", "capability": 9}]
    *found, (name, error) = findings(installed, words, cases)
    for case, (kernel, off) in zip(cases, found, strict=False):
        assert kernel == OURS and off < LIMIT, case
    assert name == "NibbleNvFp4LinearKernel" and error > 10 * LIMIT


# --- whole models ---

SHAPE = Shape(hidden=128, intermediate=192)
BY_OPTION = {"additional_config": {"nibble": {"linear_kernel": "nibble", "moe_kernel": "nibble"}}}
EAGER = OPTIONS | {"enforce_eager": True}
LAYERS = 4 * SHAPE.layers  # qkv, o, gate_up and down


def answers(
    installed: Path, here: Path, jobs: list[vllm_logprobs.Job], **environ: str
) -> tuple[list[list[float]], list[dict[str, int]]]:
    """Log-probabilities of the jobs, and how many layers of their models have a kernel."""
    given = anywhere(installed, here) | {"FP4_PRODUCTS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    results, done = vllm_logprobs.run(jobs, here, **given, **environ)
    assert not any(isinstance(one, str) for one in results), done.stderr[-3000:]
    lines = (here / "fused.kernels").read_text().splitlines()
    return [one for one in results if not isinstance(one, str)], [
        json.loads(each) for each in lines
    ]


def mean_difference(one: list[float], other: list[float]) -> float:
    return float((torch.tensor(one) - torch.tensor(other)).abs().mean())


def with_and_without(folder: Path, options: Case, repeats: int) -> list[vllm_logprobs.Job]:
    prompt = PROMPT * repeats
    return [(str(folder), options | more, prompt) for more in ({}, BY_OPTION)]


def of_both_forms(here: Path, shape: Shape, options: Case) -> list[vllm_logprobs.Job]:
    """A long prompt of one, a short one of the other."""
    folders = [write_checkpoint(here / form, shape, form, w4a4=True) for form in FORMS]
    return [*with_and_without(folders[0], options, 13), *with_and_without(folders[1], options, 1)]


def test_a_model_answers_as_with_the_cpus_w4a4_kernel(installed: Path, tmp_path: Path) -> None:
    """Bit for bit, with the layers around them the same: both forms, many rows and few."""
    found, kernels = answers(
        installed, tmp_path, of_both_forms(tmp_path, SHAPE, EAGER), PLAIN_LAYERS="1"
    )
    assert found[::2] == found[1::2] and found[0] != found[2]
    assert kernels == [{"CpuNvFp4LinearKernel": LAYERS}, {OURS: LAYERS}] * 2


def test_shards_of_two_ranks_answer_as_with_the_cpus_kernel(
    installed: Path, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "model", SHAPE, "modelopt", w4a4=True)
    jobs = with_and_without(folder, EAGER | {"tensor_parallel_size": 2}, 13)
    found, kernels = answers(installed, tmp_path, jobs, PLAIN_LAYERS="1")
    assert found[0] == found[1]
    assert [each for each in kernels if OURS in each] == [{OURS: LAYERS}] * 2


def test_residuals_and_silu_come_with_its_products(installed: Path, tmp_path: Path) -> None:
    """Other roundings choose other FP4 codes, so answers are near."""
    folder = write_checkpoint(tmp_path / "model", SHAPE, "modelopt", w4a4=True)
    jobs = with_and_without(folder, EAGER, 13)
    (theirs, ours), kernels = answers(installed, tmp_path, jobs)
    assert kernels[1] == {OURS: LAYERS}
    assert mean_difference(theirs, ours) < FLIPPED_CODES
    fused, chained = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("fused", "fused.chained")
    )
    layers = [f"model.layers.{layer}" for layer in range(SHAPE.layers)]
    assert fused == [[], [f"{layer}.mlp.gate_up_proj" for layer in layers]]
    assert chained == [[], layers]


@pytest.mark.gpu
def test_on_a_gpu_a_model_answers_as_with_vllms_emulation(installed: Path, tmp_path: Path) -> None:
    """Step by step, and compiled with CUDA graphs."""
    folder = write_checkpoint(tmp_path / "model", SHAPE, "modelopt", w4a4=True)
    emulation = {"linear_backend": "emulation", "enforce_eager": True}
    ways = (emulation, EAGER | BY_OPTION, BY_OPTION | {"enforce_eager": False})
    jobs: list[vllm_logprobs.Job] = [(str(folder), OPTIONS | way, PROMPT * 13) for way in ways]
    (theirs, *ours), kernels = answers(installed, tmp_path, jobs)
    assert kernels[1:] == [{OURS: LAYERS}] * 2
    assert all(mean_difference(theirs, each) < FLIPPED_CODES for each in ours)


@pytest.mark.slow
def test_compiled_it_answers_as_step_by_step(installed: Path, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", SHAPE, "modelopt", w4a4=True)
    jobs: list[vllm_logprobs.Job] = [
        (str(folder), OPTIONS | BY_OPTION | {"enforce_eager": eager}, PROMPT * repeats)
        for repeats in (1, 13)
        for eager in (True, False)
    ]
    found, _ = answers(installed, tmp_path, jobs)
    for one, other in zip(found[::2], found[1::2], strict=True):
        assert mean_difference(one, other) < FLIPPED_CODES


def test_experts_answer_as_with_the_cpus_w4a4_kernel(installed: Path, tmp_path: Path) -> None:
    shape = Shape(hidden=128, intermediate=96, experts=4)
    jobs = of_both_forms(tmp_path, shape, EAGER)
    theirs, _ = answers(installed, here(tmp_path, "cpu"), jobs[::2], PLAIN_LAYERS="1")
    given = {"PLAIN_LAYERS": "1", "OUR_EXPERTS": "chosen"}
    ours, kernels = answers(installed, here(tmp_path, "gpu"), jobs[1::2], **given)
    products = {OURS: 2 * shape.layers}
    assert kernels == [
        products | {name: shape.layers}
        for name in ("NibbleModelOptW4A4MoE", "NibbleCompressedTensorsW4A4MoE")
    ]
    for one, other in zip(theirs, ours, strict=True):
        assert mean_difference(one, other) < FLIPPED_CODES


def here(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name

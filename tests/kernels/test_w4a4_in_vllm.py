"""W4A4 checkpoints in vLLM with nibble's kernels for FP4 activations, on the CPU platform as a GPU
with FP4 products: single layers against vLLM's formula in float64, and whole models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kernels.test_gpu_kernel_in_vllm import OPTIONS, PROMPT, anywhere
from tests.support.changes import OPERATORS
from tests.support.in_vllm import vllm_logprobs
from tests.support.in_vllm.findings import findings
from tests.support.models.generated_nvfp4 import Form, Shape, write_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.when_changed(*OPERATORS)]
Case = dict[str, Any]
OURS = "NibbleNvFp4W4A4LinearKernel"
LIMIT = 0.004  # one rounding to BF16, or two
UNEQUAL = {"weight_scales": [0.01, 0.013]}  # whose ratio is no block scale's: column factors
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

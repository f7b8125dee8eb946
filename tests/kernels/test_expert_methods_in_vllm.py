"""Each method of vLLM's for NVFP4 experts, in vLLM's own layers, with nibble's kernel for GPUs:
formats, activations by vLLM's definitions and in FP4, biases, expert parallelism, and what is
refused by name.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.changes import OPERATORS
from tests.support.in_vllm.findings import findings

pytestmark = [pytest.mark.vllm, pytest.mark.when_changed(*OPERATORS)]
Case = dict[str, Any]
OAI = {"swiglu_limit": 1.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0}
SERVED: list[Case] = [
    {"form": "modelopt", "activation": "silu"},
    {"form": "modelopt w4a4", "activation": "silu"},
    {"form": "compressed-tensors", "activation": "silu"},
    {"form": "modelopt", "activation": "silu", "swiglu_limit": 0.5},
    {"form": "modelopt", "activation": "gelu_tanh"},
    {"form": "modelopt", "activation": "swigluoai", "biased": True},
    {"form": "compressed-tensors", "activation": "swigluoai", "biased": True},
    {"form": "modelopt", "activation": "swigluoai_uninterleave", **OAI},
    {"form": "modelopt", "activation": "relu2_no_mul"},
    {"form": "compressed-tensors", "activation": "silu_no_mul"},
    {"form": "modelopt", "activation": "silu", "part": True},
    {"form": "modelopt fp4", "activation": "silu"},
    {"form": "compressed-tensors fp4", "activation": "silu"},
    {"form": "modelopt fp4", "activation": "silu", "swiglu_limit": 0.5},
    {"form": "modelopt fp4", "activation": "gelu_tanh"},
    {"form": "modelopt fp4", "activation": "swigluoai", "biased": True},
    {"form": "compressed-tensors fp4", "activation": "swigluoai", "biased": True},
    {"form": "modelopt fp4", "activation": "relu2_no_mul"},
    {"form": "compressed-tensors fp4", "activation": "silu_no_mul"},
    {"form": "modelopt fp4", "activation": "silu", "part": True},
    {"form": "modelopt fp4", "activation": "silu", "options": {"sparse_fp4": "on"}},
]
FP4: Case = {"form": "modelopt fp4", "activation": "silu"}
IN_FP4 = "by nibble's GPU kernel for FP4 activations; expected silu or gelu_tanh or relu2"
OTHERS = "gelu_tanh or relu2, limits or biases"
REFUSED: list[tuple[Case, str]] = [
    ({"form": "modelopt", "activation": "gelu"}, OTHERS),
    ({"form": "modelopt", "activation": "swiglustep"}, OTHERS),
    (
        {"form": "modelopt", "activation": "situ", "activation_situ_beta": 1.0},
        "experts with the activation 'situ' are not supported",
    ),
    ({"form": "modelopt", "activation": "silu", "apply_router_weight_on_input": True}, OTHERS),
    ({"form": "modelopt", "activation": "swigluoai_uninterleave"}, "needs swiglu_limit"),
    (
        {"form": "modelopt", "activation": "silu", "eplb": True},
        "EPLB is not supported NibbleModelOptNvFp4MoE",
    ),
    (
        {"form": "compressed-tensors", "activation": "silu", "eplb": True},
        "EPLB is not supported NibbleCompressedTensorsNvFp4MoE",
    ),
    ({"form": "modelopt per token", "activation": "silu"}, "nvfp4_per_token are not supported"),
    ({"form": "modelopt per token fp4", "activation": "silu"}, "nvfp4_per_token are not supported"),
    ({"form": "modelopt fp4", "activation": "gelu"}, IN_FP4),
    (FP4 | {"apply_router_weight_on_input": True}, IN_FP4),
    (FP4 | {"experts": 1026}, "1026 experts are not supported"),
    (FP4 | {"bad": "input_scale"}, "has an input scale of w2 that is not a positive number"),
    (
        {"form": "compressed-tensors fp4", "activation": "silu", "bad": "input_global_scale"},
        "has an input scale of w2 that is not a positive number",
    ),
    (FP4 | {"eplb": True}, "EPLB is not supported NibbleModelOptW4A4MoE"),
    (FP4 | {"invariant": "1"}, "VLLM_BATCH_INVARIANT rules out nibble's NVFP4 experts"),
    (FP4 | {"backend": "marlin"}, "--moe-backend marlin and nibble's NVFP4 experts"),
    (
        {"form": "modelopt", "activation": "silu", "biased": True, "own": False},
        "vLLM's NVFP4 experts would leave the biases",
    ),
    (
        {"form": "compressed-tensors", "activation": "silu", "biased": True, "own": False},
        "vLLM's NVFP4 experts would leave the biases",
    ),
]
LIMIT = 0.004  # three roundings to BF16
WEIGHTS_ALONE: list[Case] = [
    {"form": form, "activation": "silu", "options": {"nvfp4_activations": "bf16"}}
    for form in ("modelopt fp4", "compressed-tensors fp4")
]


@pytest.fixture(scope="module")
def found(installed: Any) -> dict[str, float | str]:
    """The error of each case, or what refused it."""
    cases = [*SERVED, *WEIGHTS_ALONE, *(case for case, _ in REFUSED)]
    results = findings(installed, ["-m", "tests.support.in_vllm.expert_layers"], cases)
    return {str(case): result for case, result in zip(cases, results, strict=True)}


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_the_layer_computes_vllms_formula(found: dict[str, float | str], case: Case) -> None:
    error = found[str(case)]
    assert isinstance(error, float), error
    assert error < LIMIT


@pytest.mark.parametrize("case", WEIGHTS_ALONE, ids=str)
def test_with_bf16_activations_the_formula_is_another(
    found: dict[str, float | str], case: Case
) -> None:
    """So that a kernel without FP4 activations would not pass above."""
    assert float(found[str(case)]) > 10 * LIMIT


@pytest.mark.parametrize(("case", "name"), REFUSED, ids=str)
def test_what_no_kernel_computes_is_refused_by_name(
    found: dict[str, float | str], case: Case, name: str
) -> None:
    assert name in str(found[str(case)])

"""Each of vLLM's methods for FP8 experts, in vLLM's own layers, with nibble's kernel for GPUs:
kinds of scales, expert parallelism, and what is refused by name.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.changes import OPERATORS
from tests.support.in_vllm.findings import findings

pytestmark = [pytest.mark.vllm, pytest.mark.when_changed(*OPERATORS)]
Case = dict[str, Any]
SERVED: list[Case] = [
    {"form": "modelopt"},
    {"form": "modelopt mixed FP8"},
    {"form": "modelopt mixed FP8_PB_WO"},
    {"form": "fp8"},
    {"form": "fp8 block"},
    {"form": "fp8 block", "part": True},
    {"form": "compressed-tensors tensor"},
    {"form": "compressed-tensors channel"},
    {"form": "compressed-tensors block"},
]
REFUSED: list[tuple[Case, str]] = [
    ({"form": "fp8", "activation": "gelu"}, "experts with gelu are not supported by nibble's"),
    ({"form": "fp8", "swiglu_limit": 0.5}, "experts with silu are not supported by nibble's"),
    ({"form": "fp8", "apply_router_weight_on_input": True}, "router's weights on the output"),
    ({"form": "modelopt", "has_bias": True}, "experts with biases are not supported by nibble's"),
    ({"form": "fp8 block 64"}, "blocks of scales of 64 x 64 are not supported"),
    ({"form": "fp8 block", "inner": 96}, "weight quantization block_n = 128"),
    ({"form": "modelopt", "inner": 72}, "rows and columns in 16s"),
    ({"form": "fp8 block", "damage": "scale"}, "w13_weight_scale_inv"),
    ({"form": "compressed-tensors channel", "damage": "scale"}, "w13_weight_scale"),
    ({"form": "modelopt", "damage": "weight"}, "a weight of expert 1 is NaN"),
    ({"form": "modelopt", "eplb": True}, "EPLB is not supported NibbleModelOptFp8MoE"),
    ({"form": "fp8", "eplb": True}, "EPLB is not supported NibbleFp8MoE"),
]
LIMIT = 0.004  # three roundings to BF16


@pytest.fixture(scope="module")
def found(installed: Any) -> dict[str, float | str]:
    """The error of each case, or what refused it."""
    cases = [*SERVED, *(case for case, _ in REFUSED)]
    results = findings(installed, ["-m", "tests.support.in_vllm.e4m3_layers"], cases)
    return {str(case): result for case, result in zip(cases, results, strict=True)}


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_the_layer_computes_silu_mul(found: dict[str, float | str], case: Case) -> None:
    error = found[str(case)]
    assert isinstance(error, float), error
    assert error < LIMIT


@pytest.mark.parametrize(("case", "name"), REFUSED, ids=str)
def test_what_the_kernel_does_not_compute_is_refused_by_name(
    found: dict[str, float | str], case: Case, name: str
) -> None:
    assert name in str(found[str(case)])

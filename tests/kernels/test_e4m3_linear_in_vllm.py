"""FP8 linear layers in vLLM's own layers, with nibble's kernel for few rows: kinds of scales, what
stays with vLLM's kernel alone, and what is refused.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.changes import OPERATORS
from tests.support.in_vllm.findings import findings

pytestmark = [pytest.mark.vllm, pytest.mark.when_changed(*OPERATORS)]
Case = dict[str, Any]
OURS = "NibbleE4m3LinearKernel"
SERVED: list[tuple[Case, str]] = [
    ({"form": "modelopt"}, "PerTensorTorchFP8ScaledMMLinearKernel"),
    ({"form": "modelopt", "rows": (40, 24), "columns": 176}, "PerTensorTorchFP8ScaledMM"),
    ({"form": "modelopt channel"}, "ChannelWiseTorchFP8ScaledMMLinearKernel"),
    ({"form": "modelopt mixed FP8"}, "PerTensorTorchFP8ScaledMMLinearKernel"),
    ({"form": "modelopt mixed FP8_PB_WO"}, "BlockWiseTorchFP8ScaledMMLinearKernel"),
    (
        {"form": "modelopt mixed FP8_PB_WO", "rows": (256, 64)},
        "BlockWiseTorchFP8ScaledMMLinearKernel",
    ),
    ({"form": "fp8"}, "PerTensorTorchFP8ScaledMMLinearKernel"),
    ({"form": "fp8 block"}, "BlockWiseTorchFP8ScaledMMLinearKernel"),
    ({"form": "compressed-tensors tensor"}, "PerTensorTorchFP8ScaledMMLinearKernel"),
    ({"form": "compressed-tensors channel"}, "ChannelWiseTorchFP8ScaledMMLinearKernel"),
    ({"form": "compressed-tensors block"}, "BlockWiseTorchFP8ScaledMMLinearKernel"),
]
VLLMS: list[Case] = [
    {"form": "modelopt", "kernel": "vllm"},
    {"form": "modelopt", "rows": (20, 16)},
    {"form": "modelopt", "columns": 200},
    {"form": "modelopt", "damage": True},
    {"form": "modelopt", "dtype": "float16"},
    {"form": "modelopt", "backend": "torch"},
]
FEW, MANY = 0.003, 0.05  # sums rounded to BF16 once; activations rounded to E4M3


@pytest.fixture(scope="module")
def found(installed: Any) -> dict[str, Any]:
    """What is found of each case."""
    cases = [*(case for case, _ in SERVED), *VLLMS]
    results = findings(installed, ["-m", "tests.support.in_vllm.e4m3_linear_layers"], cases)
    return {str(case): result for case, result in zip(cases, results, strict=True)}


@pytest.mark.parametrize(("case", "kernel"), SERVED, ids=str)
def test_few_rows_are_multiplied_without_rounding_activations(
    found: dict[str, Any], case: Case, kernel: str
) -> None:
    result = found[str(case)]
    assert result["kernel"].startswith(f"other: {OURS} {kernel}"), result
    assert result["few"] < FEW and result["one"] < FEW
    assert "BlockWise" in kernel or FEW < result["many"] < MANY


@pytest.mark.parametrize("case", VLLMS, ids=str)
def test_other_layers_have_vllms_kernel_alone(found: dict[str, Any], case: Case) -> None:
    result = found[str(case)]
    assert OURS not in str(result), result

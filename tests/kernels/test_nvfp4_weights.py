"""Weight quantization: ModelOpt's bytes, zeros, refusals, four-over-six."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tests.support.kernels.kernel_cases import vectors


def hex_of(tensor: torch.Tensor) -> str:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes().hex()


def gaussian(rows: int = 64, columns: int = 256) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).bfloat16()


def relative_error(weight: torch.Tensor, rounded: torch.Tensor) -> float:
    return float((weight.float() - rounded).norm() / weight.float().norm())


@pytest.fixture(scope="module")
def weights(kernels: ModuleType) -> ModuleType:
    import nibble_kernels.weight_quant

    return nibble_kernels.weight_quant


def test_modelopts_bytes(weights: ModuleType) -> None:
    for case in vectors("nvfp4_weights_modelopt")["vectors"]:
        data = bytearray.fromhex(case["x_bf16_le_hex"])
        found = weights.quantize(torch.frombuffer(data, dtype=torch.bfloat16).view(case["shape"]))
        assert hex_of(found.packed) == case["weight_packed_hex"], case["kind"]
        assert hex_of(found.scales) == case["weight_scale_e4m3_hex"], case["kind"]
        assert (
            f"{found.global_scale.view(torch.int32).item():08x}" == case["weight_scale_2_f32_bits"]
        )
        assert hex_of(weights.dequantize(found)) == case["dequant_f32_le_hex"], case["kind"]


def test_rows_do_not_depend_on_how_many_are_rounded_at_once(
    weights: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = weights.quantize(gaussian())
    monkeypatch.setattr(weights, "ELEMENTS_AT_ONCE", 300)
    parts = weights.quantize(gaussian())
    assert all(hex_of(a) == hex_of(b) for a, b in zip(whole, parts, strict=True))


def test_a_larger_amax_gives_a_larger_global_scale_and_the_same_error(weights: ModuleType) -> None:
    weight = gaussian()
    own = weights.quantize(weight)
    larger = weights.quantize(weight, weight.abs().amax().float() * 2.9)
    assert float(larger.global_scale / own.global_scale) == pytest.approx(2.9)
    assert relative_error(weight, weights.dequantize(larger)) == pytest.approx(0.095, abs=0.003)


def test_four_over_six_errs_less_and_in_no_block_more_than_six(weights: ModuleType) -> None:
    weight = gaussian()
    mixed = weights.dequantize(weights.quantize(weight, four_over_six=True))
    # a global scale for 448 in place of 256 is what all sixes with the same scale would have
    six = weights.dequantize(weights.quantize(weight, weight.abs().amax().float() * (448 / 256)))
    assert relative_error(weight, mixed) == pytest.approx(0.087, abs=0.003)
    errors = [
        (weight.float() - one).square().unflatten(-1, (-1, 16)).sum(-1) for one in (mixed, six)
    ]
    assert (errors[0] <= errors[1] * (1 + 1e-5)).all()


@pytest.mark.parametrize("four_over_six", [False, True])
def test_zeros_are_finite_and_stay_zeros(weights: ModuleType, four_over_six: bool) -> None:
    found = weights.quantize(torch.zeros(2, 32), four_over_six=four_over_six)
    assert found.scales.float().isfinite().all() and (found.scales.float() > 0).all()
    assert float(found.global_scale) > 0
    assert not weights.dequantize(found).any()


@pytest.mark.parametrize("shape", [(4, 24), (32,), (2, 2, 32)])
def test_a_shape_that_has_no_blocks_is_refused(weights: ModuleType, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shape"):
        weights.quantize(torch.ones(shape))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(weights: ModuleType, value: float) -> None:
    weight = torch.ones(2, 32)
    weight[1, 3] = value
    with pytest.raises(ValueError, match="finite"):
        weights.quantize(weight)

"""Weight quantization: ModelOpt's bytes, zeros, refusals, four-over-six."""

from __future__ import annotations

from collections.abc import Iterator
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
    scale = (gaussian().abs().amax().float(), whole.global_scale)
    monkeypatch.setattr(weights.reference, "ELEMENTS_AT_ONCE", 300)
    parts = weights.reference.quantize_weight(gaussian(), *scale, False)
    assert all(hex_of(a) == hex_of(b) for a, b in zip(whole[:2], parts, strict=True))


def spread(rows: int, columns: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Weights of many magnitudes, with ties, zeros and both signs of zero."""
    random = torch.Generator().manual_seed(rows + columns)
    normal = torch.randn(rows, columns, generator=random)
    wide = normal * torch.randn(rows, columns, generator=random).mul(3).exp()
    sparse = -normal * 1e-4
    sparse[:, :16] = 0.0
    for each in (normal, wide, normal.mul(4).round() / 8, sparse):
        yield each.clamp(-6e4, 6e4).to(dtype)


@pytest.mark.parametrize("four_over_six", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_compiled_operator_gives_the_specifications_bytes(
    weights: ModuleType, compiled: str, dtype: torch.dtype, four_over_six: bool
) -> None:
    if compiled != "cpu":
        pytest.skip("nothing is compiled for it")
    for rows, columns in ((1, 16), (7, 208), (64, 2064)):
        for weight in spread(rows, columns, dtype):
            largest = weights.largest_magnitude(weight)
            assert torch.equal(largest, weight.abs().amax().float())
            for amax in (largest, largest * 2.3, torch.tensor(0.0)):
                found = weights.quantize(weight, amax, four_over_six=four_over_six)
                stated = weights.reference.quantize_weight(
                    weight, amax, found.global_scale, four_over_six
                )
                assert [hex_of(one) for one in found[:2]] == [hex_of(one) for one in stated]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_magnitude_is_found_anywhere_and_a_nan_is_no_number(
    weights: ModuleType, dtype: torch.dtype
) -> None:
    x = torch.ones(3 * 65536 + 5, dtype=dtype)
    for place in (0, 65535, 65536, len(x) - 1):
        x[place] = -3.5
        assert float(weights.largest_magnitude(x)) == 3.5
        x[place] = 1.0
    x[70000] = float("nan")
    assert weights.largest_magnitude(x).isnan()
    assert float(weights.largest_magnitude(x[:0])) == 0.0


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

"""nibble::rms_norm beside float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.kernels.kernel_cases import assert_same_bits


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, kernels: Any) -> str:
    """On the CPU the specification computes; CUDA must be compiled."""
    assert request.param == "cpu" or kernels.implementations()["cuda"] == "compiled"
    return request.param


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 8), (3, 576), (2, 5, 4096), (7, 5120), (2, 32768)])
def test_a_row_is_divided_by_its_root_mean_square_and_rounded_twice(
    device: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    from nibble_kernels.rms_norm import rms_norm

    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype) * 3, (torch.rand(shape[-1]) + 0.5).to(dtype)
    y = rms_norm(x.to(device), weight.to(device), 1e-5).cpu()
    normal = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    exact = normal * weight.double()
    rounding = torch.finfo(dtype).eps / 2
    assert y.shape == x.shape and y.dtype == dtype
    assert ((y.double() - exact).abs() <= exact.abs() * (2.01 * rounding + 2.0**-20) + 1e-7).all()


@pytest.mark.parametrize("shape", [(1, 64), (3, 2048), (2, 3, 5120)])
def test_a_residual_is_added_before_the_norm(device: str, shape: tuple[int, ...]) -> None:
    """The norm is that of the sum before it is rounded."""
    from nibble_kernels.rms_norm import add_rms_norm

    torch.manual_seed(0)
    x, residual = torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16() * 9
    weight = (torch.rand(shape[-1]) + 0.5).bfloat16()
    y, total = add_rms_norm(x.to(device), residual.to(device), weight.to(device), 1e-5)
    exact_total = x.float() + residual.float()
    exact = exact_total / (exact_total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert torch.equal(total.cpu(), exact_total.bfloat16())
    assert ((y.cpu().float() - exact).abs() <= exact.abs() * 2.02 * 2.0**-8 + 1e-6).all()


def test_a_rows_result_does_not_depend_on_the_other_rows(device: str) -> None:
    from nibble_kernels.rms_norm import rms_norm

    torch.manual_seed(0)
    x, weight = torch.randn(300, 4096).bfloat16().to(device), torch.ones(4096).bfloat16().to(device)
    x[1] = float("nan")
    whole = rms_norm(x, weight, 1e-6).cpu()
    assert_same_bits((rms_norm(x[:1], weight, 1e-6).cpu(),), (whole[:1],))
    assert whole[1].isnan().all() and not whole[2:].isnan().any()


@pytest.mark.gpu
def test_rows_that_the_kernel_does_not_take_are_refused(kernels: Any) -> None:
    from nibble_kernels.rms_norm import rms_norm

    for columns in (12, 32776):
        x = torch.randn(2, columns).bfloat16().cuda()
        with pytest.raises(RuntimeError, match="columns in 8s, up to 32768"):
            rms_norm(x, torch.ones(columns).bfloat16().cuda(), 1e-6)


def test_the_operator_is_registered_soundly(device: str) -> None:
    x = torch.randn(3, 64).bfloat16().to(device)
    weight = torch.ones(64).bfloat16().to(device)
    torch.library.opcheck(torch.ops.nibble.rms_norm.default, (x, weight, 1e-6))
    torch.library.opcheck(torch.ops.nibble.add_rms_norm.default, (x, x.clone(), weight, 1e-6))

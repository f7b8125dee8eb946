"""nvfp4_w4a4_linear and its forms with SiLU · mul and RMSNorm, against float64. On the CPU it is
the specification; GPUs before SM12x emulate its products.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels.kernel_cases import (
    activations,
    assert_residual_comes_before_rounding,
    assert_rounded_once,
    assert_same_bits,
    fitting_scale,
    packed_weight,
    values_of,
)

GLOBAL_SCALE = 1.23e-4
SHAPES = [(17, 24, 160), (40, 136, 1056), (130, 48, 64)]  # tokens, N, K


def prepared(device: str, rows: int, columns: int) -> tuple[Any, Tensor]:
    """A weight on the device, and its values."""
    from nibble_kernels.nvfp4_linear.weight import PreparedWeight, prepare_weight

    weight = packed_weight(rows, columns)
    found = prepare_weight(*weight, native=True)
    codes, scales = (one.to(device) for one in found[:2])
    return PreparedWeight(codes, scales, found.rows, True), values_of(*weight)


def e4m3(*shape: int) -> Tensor:
    return torch.zeros(shape).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_rounded_once(kernels: ModuleType, device: str, dtype: torch.dtype) -> None:
    from nibble_kernels.activation_quant.reference import nvfp4_quant
    from nibble_kernels.nvfp4_linear.w4a4 import nvfp4_w4a4_linear

    for tokens, rows, columns in SHAPES:
        weight, values = prepared(device, rows, columns)
        x = (activations(tokens, columns, torch.bfloat16) / 16).to(dtype)
        inverse = fitting_scale(x)
        factors, bias = (torch.rand(rows) + 0.5) / 64, torch.randn(rows).to(dtype)
        options: dict[str, Any] = {"column_scale": factors.to(device), "bias": bias.to(device)}
        y = nvfp4_w4a4_linear(x.to(device), inverse.to(device), weight, GLOBAL_SCALE, **options)
        rounded = values_of(*nvfp4_quant(x, inverse, tiled=False, exact=True))
        factor = GLOBAL_SCALE * factors.double()
        assert_rounded_once(y.cpu(), rounded, values, factor, bias.double())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("tokens", [1, 16, 17, 129, 512, 513, 1100])
@pytest.mark.parametrize("silu_mul", [False, True])
def test_one_operator_is_quantization_product_and_residual(
    kernels: ModuleType, device: str, tokens: int, silu_mul: bool
) -> None:
    """Any number of rows, in one format of activations; more than 512 are multiplied in slices."""
    from nibble_kernels.activation_quant.reference import nvfp4_quant
    from nibble_kernels.nvfp4_linear.w4a4 import nvfp4_w4a4_weight_linear

    rows, columns = 48, 416
    weight, values = prepared(device, rows, columns)
    x = activations(tokens, columns, torch.bfloat16) / 16
    inverse = fitting_scale(x)
    factors, bias = torch.rand(rows) + 0.5, torch.randn(rows).bfloat16()
    options: dict[str, Any] = {"column_scale": factors.to(device), "bias": bias.to(device)}
    options["silu_mul"] = silu_mul

    def product(**more: Any) -> Tensor:
        given = (x.to(device), inverse.to(device), weight, 1e-3)
        return nvfp4_w4a4_weight_linear(*given, **options, **more)

    y, rounded = product(), values_of(*nvfp4_quant(x, inverse, tiled=False, exact=True))
    exact = rounded @ values.T * 1e-3 * factors.double() + bias.double()
    bound = 2.0**-12 * (rounded.abs() @ values.abs().T * 1e-3 * factors.double() + 1)
    if silu_mul:
        gate, up = exact.chunk(2, dim=-1)
        of_gate, of_up = bound.chunk(2, dim=-1)
        exact = torch.nn.functional.silu(gate) * up
        bound = 1.1 * of_gate * up.abs() + of_up * gate.abs()
    assert ((y.cpu().double() - exact).abs() <= exact.abs() * 2.0**-8 + bound).all()
    assert_residual_comes_before_rounding(lambda r: product(residual=r))


def test_the_operator_takes_any_number_of_rows_compiled_once(kernels: ModuleType) -> None:
    from nibble_kernels.nvfp4_linear.w4a4 import nvfp4_w4a4_weight_linear

    weight, _ = prepared("cpu", 24, 160)
    inverse, graphs = torch.tensor(50.0), list[Any]()

    def product(x: Tensor) -> Tensor:
        return nvfp4_w4a4_weight_linear(x, inverse, weight, GLOBAL_SCALE, silu_mul=True)

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(product, backend=backend, dynamic=True, fullgraph=True)
    for tokens in (3, 17, 600):
        x = activations(tokens, 160, torch.bfloat16)
        assert_same_bits((compiled(x),), (product(x),))
    assert len(graphs) == 1
    called = [str(node.target) for node in graphs[0].graph.nodes if "nibble" in str(node.target)]
    assert called == ["nibble.nvfp4_w4a4_weight_linear.default"]


def test_what_comes_before_is_quantized_with_it(kernels: ModuleType) -> None:
    from nibble_kernels import activation_quant as quant
    from nibble_kernels.nvfp4_linear import w4a4

    weight, _ = prepared("cpu", 24, 160)
    x, norm = activations(19, 160, torch.bfloat16), torch.rand(160).bfloat16()
    gate_up = activations(19, 320, torch.bfloat16)
    scale = torch.tensor([50.0])

    def product(codes: Tensor, scales: Tensor, *_: Tensor) -> Tensor:
        rows = w4a4.quantized_rows(codes, scales, tiled=True)
        return w4a4.nvfp4_w4a4_product(rows, weight, GLOBAL_SCALE, torch.bfloat16)

    silu = w4a4.silu_mul_nvfp4_w4a4_linear(gate_up, scale, weight, GLOBAL_SCALE)
    assert_same_bits((silu,), (product(*quant.silu_mul_nvfp4_quant(gate_up, scale)),))
    normed = w4a4.add_rmsnorm_nvfp4_w4a4_linear(x, x, norm, scale, 1e-6, weight, GLOBAL_SCALE)
    quantized = quant.add_rmsnorm_nvfp4_quant(x, x, norm, scale, 1e-6)
    assert_same_bits(normed, (product(*quantized), quantized[2]))


def test_the_self_test_compares_it(kernels: ModuleType) -> None:
    from nibble.trials.worker.kernels import prepare, stored_activations
    from nibble.trials.worker.truth import Truth, random_weight
    from nibble.trials.worker.truth import activations as normal

    weight = random_weight((136, 160), "cpu")
    trial, x = prepare("w4a4:fp4", weight), normal(19, 160, "cpu")
    for factor, is_right in ((1.0, True), (1.1, False)):
        y = trial.product(x) * factor
        fault, _ = Truth(weight).fault(y, x, trial.form, stored_activations(x, trial.form))
        assert (fault == "") == is_right


def test_what_it_does_not_take_is_named(kernels: ModuleType) -> None:
    from nibble_kernels.nvfp4_linear.w4a4 import (
        nvfp4_w4a4_product,
        nvfp4_w4a4_weight_linear,
        quantized_rows,
    )

    weight, _ = prepared("cpu", 24, 160)
    codes, scales = torch.zeros(1, 80, dtype=torch.uint8), e4m3(128, 12)
    x = quantized_rows(codes, scales, tiled=True)
    product: Any = nvfp4_w4a4_product
    inverse = torch.ones(1)
    with pytest.raises(ValueError, match="prepared with native=True"):
        nvfp4_w4a4_weight_linear(
            torch.zeros(1, 160).bfloat16(), inverse, weight._replace(native=False), 1.0
        )
    with pytest.raises(ValueError, match="expected bfloat16 or float16"):
        nvfp4_w4a4_weight_linear(torch.zeros(1, 160), inverse, weight, 1.0)
    with pytest.raises(ValueError, match="a multiple of 32 columns; got 144"):
        nvfp4_w4a4_weight_linear(torch.zeros(1, 144).bfloat16(), inverse, weight, 1.0)
    with pytest.raises(ValueError, match="prepared with native=True"):
        product(x, weight._replace(native=False), 1.0, torch.bfloat16)
    with pytest.raises(ValueError, match="expected bfloat16 or float16"):
        product(x, weight, 1.0, torch.float32)
    with pytest.raises(ValueError, match="a multiple of 32 columns; got 144"):
        product(x._replace(codes=codes[:, :72]), weight, 1.0, torch.bfloat16)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_scales_of_the_other_layout_are_refused(kernels: ModuleType, device: str) -> None:
    """Row by row they have the shape of tiled ones, if rows are in 128s and K in 64s."""
    from nibble_kernels.activation_quant import nvfp4_quant
    from nibble_kernels.nvfp4_linear.w4a4 import nvfp4_w4a4_product, quantized_rows

    weight, _ = prepared(device, 24, 192)
    x = activations(128, 192, torch.bfloat16).to(device)
    inverse = fitting_scale(x).to(device)
    (codes, tiled), (_, by_row) = (nvfp4_quant(x, inverse, tiled=each) for each in (True, False))
    assert tiled.shape == by_row.shape and not torch.equal(tiled.float(), by_row.float())
    product: Any = nvfp4_w4a4_product
    given = (quantized_rows(codes, tiled, tiled=True), quantized_rows(codes, by_row, tiled=False))
    results = [product(each, weight, GLOBAL_SCALE, torch.bfloat16) for each in given]
    assert_same_bits((results[0].cpu(),), (results[1].cpu(),))
    for bare in (codes, (codes, by_row), (codes, tiled)):
        with pytest.raises(TypeError, match=r"Use quantized_rows\(codes, scales, tiled=…\)"):
            product(bare, weight, GLOBAL_SCALE, torch.bfloat16)
    operator = torch.ops.nibble.nvfp4_w4a4_linear
    options = (*weight[:3], GLOBAL_SCALE, None, None, None, False, False)
    for other in (by_row[None], tiled.T, tiled.flatten()):
        # A GPU's operator raises RuntimeError.
        with pytest.raises((ValueError, RuntimeError), match="scales of 128 by 192 in 128x4 tiles"):
            operator(codes, other, *options)


def test_scales_have_the_shape_of_the_layout_that_they_are_given_as(kernels: ModuleType) -> None:
    from nibble_kernels.nvfp4_linear.w4a4 import quantized_rows

    codes, scales = torch.zeros(2, 3, 80, dtype=torch.uint8), e4m3(128, 12)
    assert quantized_rows(codes, scales, tiled=True).tiled_scales.shape == (128, 12)
    by_row = quantized_rows(codes, e4m3(2, 3, 10), tiled=False)
    assert by_row.tiled_scales.shape == (128, 12)
    with pytest.raises(ValueError, match=r"row by row, \[2, 3, 10\]; got \[128, 12\]"):
        quantized_rows(codes, scales, tiled=False)
    with pytest.raises(ValueError, match=r"in 128x4 tiles, \[128, 12\]; got \[6, 10\]"):
        quantized_rows(codes, e4m3(6, 10), tiled=True)
    with pytest.raises(ValueError, match=r"expected float8_e4m3fn scales; got torch\.float32"):
        quantized_rows(codes, scales.float(), tiled=True)

"""nvfp4_weight_linear and its parts: prepared weights, the decode kernel, dequantization. On the
CPU it is the specification.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels.kernel_cases import (
    activations,
    assert_rounded_once,
    assert_same_bits,
    packed_weight,
    values_of,
)

EVERY_SCALE = torch.tensor([byte for byte in range(256) if byte & 127 != 127], dtype=torch.uint8)
SHAPES = [(16, 32), (24, 176), (136, 1056)]  # rows and columns of the weight
ROWS = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 200)
GLOBAL_SCALE = 1.23e-4


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, kernels: Any) -> str:
    """On the CPU the specification computes; CUDA must be compiled."""
    assert request.param == "cpu" or kernels.implementations()["cuda"] == "compiled"
    return request.param


def prepared(device: str, codes: Tensor, scales: Tensor, native: bool = False) -> Any:
    from nibble_kernels.nvfp4_linear.weight import prepare_weight

    return prepare_weight(codes.to(device), scales.to(device), native)


def decode(x: Tensor, weight: Any, global_scale: float = GLOBAL_SCALE, **rest: Any) -> Tensor:
    """The decode kernel on the weight's device; the result on the CPU."""
    from nibble_kernels.nvfp4_linear.gpu import nvfp4_decode_linear

    device = weight.codes.device
    moved: dict[str, Any] = {
        key: value.to(device) if isinstance(value, Tensor) else value for key, value in rest.items()
    }
    return nvfp4_decode_linear(x.to(device), weight, global_scale, **moved).cpu()


def layouts_of(dtype: torch.dtype = torch.bfloat16) -> tuple[bool, ...]:
    """Values of `native`: shifted codes are for bfloat16 alone."""
    return (False, True) if dtype == torch.bfloat16 else (True,)


def one_of_each() -> tuple[Tensor, Tensor]:
    """Every code under every scale: 254 rows and two of zeros, 64 columns."""
    codes = torch.arange(16, dtype=torch.uint8)
    row = torch.cat([codes[0::2] | codes[1::2] << 4] * 4)
    scales = (
        torch.cat((EVERY_SCALE, torch.zeros(2, dtype=torch.uint8)))[:, None]
        .expand(-1, 4)
        .contiguous()
    )
    return row.expand(256, -1).contiguous(), scales.view(torch.float8_e4m3fn)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("shape", [(8, 16), (24, 48), (256, 64), (40, 400)])
def test_a_prepared_weight_means_what_it_meant_and_has_positive_scales(
    kernels: object, shape: tuple[int, int], native: bool
) -> None:
    from nibble_kernels.nvfp4_linear.weight import prepare_weight, stored_weight

    codes, scales = one_of_each() if shape == (256, 64) else packed_weight(*shape)
    expected = values_of(codes, scales)
    weight = prepare_weight(codes, scales, native)
    assert torch.equal(values_of(*stored_weight(weight, shape[1])) + 0.0, expected + 0.0)
    assert torch.equal(values_of(codes, scales) + 0.0, expected + 0.0)  # as it was
    assert (weight.scales >= 1).all() and (weight.scales < 0x7F).all()


def test_a_weight_that_cannot_be_prepared_is_refused(kernels: object) -> None:
    from nibble_kernels.nvfp4_linear.weight import prepare_weight

    codes, scales = packed_weight(16, 64)
    scales.view(torch.uint8)[3, 1] = 0xFF
    with pytest.raises(ValueError, match="NaN"):
        prepare_weight(codes, scales, native=True)
    with pytest.raises(ValueError, match="multiple of 8 rows; got 12"):
        prepare_weight(*packed_weight(12, 64), native=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_code_under_every_scale_is_exact(device: str, dtype: torch.dtype) -> None:
    """Products, one column at a time, and the dequantized weight."""
    from nibble_kernels.nvfp4_linear.gpu import nvfp4_dequantize_weight

    codes, scales = one_of_each()
    expected = values_of(codes, scales) + 0.0
    x = torch.eye(64, dtype=dtype)
    for native in layouts_of(dtype):
        weight = prepared(device, codes, scales, native)
        for rows in (1, 8, 16, 32, 64):
            y = decode(x[:rows], weight, 1.0)
            assert torch.equal(y.double() + 0.0, expected.T[:rows]), (native, rows)
        assert torch.equal(
            nvfp4_dequantize_weight(weight, 64, x.to(device)).cpu().double() + 0.0, expected
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("device", "shape"),
    [("cpu", shape) for shape in SHAPES]
    + [
        pytest.param("cuda", shape, marks=pytest.mark.gpu)
        for shape in (*SHAPES, (1544, 2048), (520, 17408))
    ],
)
def test_sums_are_rounded_once(
    kernels: object, device: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Any number of rows, with and without column factors and bias, through both operators."""
    from nibble_kernels.nvfp4_linear.gpu import nvfp4_weight_linear

    codes, scales = packed_weight(*shape)
    w = values_of(codes, scales)
    weights = [prepared(device, codes, scales, native) for native in layouts_of(dtype)]
    factors, bias = torch.rand(shape[0]) + 0.5, torch.randn(shape[0]).to(dtype)
    x = activations(ROWS[-1], shape[1], dtype)
    for rows in ROWS if device == "cuda" else ROWS[:3]:
        few = x[:rows]
        for weight in weights:
            y = decode(few, weight)
            assert_rounded_once(y, few, w, torch.tensor(GLOBAL_SCALE).double())
        weight = weights[0]
        y = decode(few, weight, column_scale=factors, bias=bias)
        assert_rounded_once(y, few, w, GLOBAL_SCALE * factors.double(), bias.double())
        y = nvfp4_weight_linear(
            few.to(device),
            weight,
            GLOBAL_SCALE,
            column_scale=factors.to(device),
            bias=bias.to(device),
        )
        assert_rounded_once(y.cpu(), few, w, GLOBAL_SCALE * factors.double(), bias.double())
        y = nvfp4_weight_linear(few.to(device), weight, GLOBAL_SCALE)
        assert_rounded_once(y.cpu(), few, w, torch.tensor(GLOBAL_SCALE).double())


def test_columns_in_sixteens_are_multiplied_too(device: str) -> None:
    from nibble_kernels.nvfp4_linear.gpu import nvfp4_weight_linear

    codes, scales = packed_weight(48, 80)
    x, bias = activations(5, 80, torch.bfloat16), torch.randn(48).bfloat16()
    y = nvfp4_weight_linear(
        x.to(device), prepared(device, codes, scales), GLOBAL_SCALE, bias=bias.to(device)
    )
    factor = torch.tensor(GLOBAL_SCALE).double()
    assert_rounded_once(y.cpu(), x, values_of(codes, scales), factor, bias.double())


def test_silu_mul_and_residual_come_before_the_only_rounding(device: str) -> None:
    codes, scales = packed_weight(272, 512)
    weight = prepared(device, codes, scales)
    x, residual = activations(11, 512, torch.bfloat16), torch.randn(11, 136).bfloat16()
    y = decode(x, weight, 1e-4, silu_mul=True, residual=residual).double()
    gate, up = (1e-4 * x.double() @ values_of(codes, scales).T).chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gate) * up + residual.double()
    assert ((y - exact).abs() <= exact.abs() * 2.0**-8 + 2.0**-18 * (gate * up).abs() + 1e-6).all()


def test_activations_keep_their_range(device: str) -> None:
    """1e30 and 1e-30 in one batch: float16 operands scale each row by another power of two."""
    codes, scales = packed_weight(32, 256)
    x = torch.randn(3, 256) * torch.tensor([[1e30], [1.0], [1e-30]])
    x[1, 7] = 0.0
    x = x.bfloat16()
    for native in layouts_of():
        y = decode(x, prepared(device, codes, scales, native), 1.0)
        assert_rounded_once(y, x, values_of(codes, scales), torch.ones(()).double())


def test_nan_and_infinity_show(device: str) -> None:
    codes, scales = packed_weight(32, 256)
    x = torch.randn(4, 256).bfloat16()
    x[1, 3], x[2, 200] = float("nan"), float("inf")
    for native in layouts_of():
        y = decode(x, prepared(device, codes, scales, native))
        assert (
            y[[0, 3]].isfinite().all() and not y[1].isfinite().any() and not y[2].isfinite().any()
        )


def test_no_rows(device: str) -> None:
    weight = prepared(device, *packed_weight(32, 256))
    assert decode(torch.empty(0, 256, dtype=torch.bfloat16), weight).shape == (0, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_division_of_the_work_gives_the_sum(kernels: object, ranks: int) -> None:
    codes, scales = packed_weight(1032, 3088)
    weight, x = prepared("cuda", codes, scales), activations(64, 3088, torch.bfloat16)
    for rows in (1, 12, 30, 64):
        for phases in (1, 2, 5):
            y = decode(x[:rows], weight, division=(ranks, phases))
            assert_rounded_once(
                y, x[:rows], values_of(codes, scales), torch.tensor(GLOBAL_SCALE).double()
            )


@pytest.mark.gpu
def test_codes_for_bfloat16_refuse_float16(kernels: object) -> None:
    weight = prepared("cuda", *packed_weight(32, 64))
    with pytest.raises(RuntimeError, match="prepared for bfloat16"):
        decode(torch.randn(2, 64).half(), weight)


def test_a_batch_invariant_prompt_is_multiplied_as_its_last_token_is(device: str) -> None:
    """By the decode kernel, which rounds gate and up once; torch's product, for as many rows
    otherwise, does so twice.
    """
    from nibble_kernels.nvfp4_linear.gpu import MAX_WARPGROUP_ROWS, nvfp4_weight_linear

    weight = prepared(device, *packed_weight(272, 512))
    x = activations(MAX_WARPGROUP_ROWS + 1, 512, torch.bfloat16)
    decoded = decode(x, weight, silu_mul=True, batch_invariant=True)
    found = [
        nvfp4_weight_linear(
            x.to(device), weight, GLOBAL_SCALE, silu_mul=True, batch_invariant=invariant
        )
        for invariant in (True, False)
    ]
    assert_same_bits((found[0].cpu(),), (decoded,))
    assert not torch.equal(found[1].cpu(), decoded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_silu_mul_of_many_rows_is_rounded_once(device: str, dtype: torch.dtype) -> None:
    gate_up = (4 * torch.randn(1037, 2 * 264)).to(dtype)
    found = torch.ops.nibble.silu_mul(gate_up.to(device)).cpu().double()
    gate, up = gate_up.double().chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gate) * up
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    assert ((found - exact).abs() <= 1.01 * unit * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 100, 700, 1030])
@pytest.mark.parametrize("with_factors", [False, True])
def test_a_residual_is_added_for_any_number_of_rows(
    device: str, rows: int, with_factors: bool
) -> None:
    """Within the rounding of the product and that of the sum."""
    from nibble_kernels.nvfp4_linear.gpu import nvfp4_weight_linear

    codes, scales = packed_weight(272, 512)
    x, residual = activations(rows, 512, torch.bfloat16), torch.randn(rows, 272).bfloat16()
    factors = torch.rand(272) + 0.5 if with_factors else torch.ones(272)
    kept = residual.to(device)
    y = nvfp4_weight_linear(
        x.to(device),
        prepared(device, codes, scales),
        1e-3,
        column_scale=factors.to(device) if with_factors else None,
        residual=kept,
    )
    product = 1e-3 * x.double() @ values_of(codes, scales).T * factors.double()
    bound = (2 * product.abs() + residual.double().abs()) * 2.0**-8 + 1e-3
    assert ((y.cpu().double() - product - residual.double()).abs() <= bound).all()
    assert torch.equal(kept.cpu(), residual)


@pytest.mark.gpu
def test_a_rows_result_does_not_depend_on_its_batch(kernels: object) -> None:
    """Within 4, 8, 16 and 32 rows; with batch_invariant, for any number."""
    from nibble_kernels.nvfp4_linear.gpu import nvfp4_weight_linear

    codes, scales = packed_weight(2048, 5120)
    weight, x = prepared("cuda", codes, scales), activations(200, 5120, torch.bfloat16)
    for least, most in ((1, 4), (5, 8), (9, 16), (17, 32), (49, 64)):
        everything = decode(x[:most], weight)
        assert_same_bits((decode(x[:least], weight),), (everything[:least],), most)

    def invariant(rows: int) -> Tensor:
        return nvfp4_weight_linear(
            x[:rows].cuda(), weight, GLOBAL_SCALE, batch_invariant=True
        ).cpu()

    everything = invariant(len(x))
    for rows in (1, 5, 16, 17, 40, 64, 65):
        assert_same_bits((invariant(rows),), (everything[:rows],), rows)


@pytest.mark.gpu
def test_a_hundred_replays_of_a_graph_give_the_same_bits(kernels: object) -> None:
    """One product after the other, as in a model: each begins while the last ends."""
    from nibble_kernels.nvfp4_linear.gpu import nvfp4_weight_linear

    weight = prepared("cuda", *packed_weight(4096, 4096))
    x = activations(4, 4096, torch.bfloat16).cuda()

    def chain() -> Tensor:
        y = x
        for _ in range(4):
            y = nvfp4_weight_linear(y / y.norm(dim=-1, keepdim=True), weight, 1e-3)
        return y

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    x.copy_(activations(4, 4096, torch.bfloat16, seed=3))
    expected = chain().cpu()
    for _ in range(100):
        graph.replay()
        assert_same_bits((y.cpu(),), (expected,))


def test_operators_are_registered_soundly(device: str) -> None:
    """torch's own check: schema, fake implementation, autograd registration, dynamic shapes."""
    weight = prepared(device, *packed_weight(48, 96))
    x = activations(5, 96, torch.bfloat16).to(device)
    ops = torch.ops.nibble
    torch.library.opcheck(
        ops.nvfp4_decode_linear.default, (x, *weight, 1.0, None, None, None, True, False, [])
    )
    torch.library.opcheck(
        ops.nvfp4_weight_linear.default, (x, *weight, 1.0, None, None, None, True, False)
    )
    torch.library.opcheck(ops.nvfp4_dequantize_weight.default, (*weight, 96, x))

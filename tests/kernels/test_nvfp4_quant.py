"""nvfp4_quant and what is fused before it: the vectors, every implementation bit for bit, edges
and refusals.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.support.kernels.kernel_cases import (
    activations,
    assert_as_specified,
    assert_same_bits,
    bfloat16_of,
    bytes_of,
    call,
    fitting_scale,
    float_of,
    two_byte_or_any,
    vectors,
)

# One block; columns that fill no tile; a row short of a tile and one more than it; more than a
# warp's and a thread block's.
SHAPES = [(1, 16), (3, 48), (127, 64), (129, 208), (8, 1040), (257, 2048)]
LAYOUTS = (True, False)  # tiled


def test_vectors(implementation: str) -> None:
    """What vLLM 0.32's reference gives, bit for bit."""
    for case in vectors("nvfp4_activation_vllm")["vectors"]:
        x = bfloat16_of(case["x_bf16_le_hex"], case["shape"])
        scale = float_of(case["input_global_scale_inv_f32_bits"])
        codes, scales = call(
            implementation, "activation_quant", "nvfp4_quant", x, scale, False, True
        )
        expected = bytes_of(case["packed_hex"]), bytes_of(case["block_scale_e4m3_hex"])
        assert_same_bits(
            (codes.view(-1), scales.view(torch.uint8).view(-1)), expected, case["kind"]
        )


@pytest.mark.parametrize(
    "factor", [1.0, 30.0, 1e-4], ids=["fitting", "saturating", "scales of zero"]
)
def test_as_specified(compiled: str, factor: float) -> None:
    for shape, dtype, tiled in product(SHAPES, two_byte_or_any(compiled), LAYOUTS):
        x = activations(*shape, dtype)
        args = (x, fitting_scale(x, factor), tiled, True)
        assert_as_specified(
            compiled, "activation_quant", "nvfp4_quant", *args, case=(shape, dtype, tiled)
        )


def test_silu_mul_as_specified(compiled: str) -> None:
    for (rows, columns), dtype, tiled in product(SHAPES, two_byte_or_any(compiled), LAYOUTS):
        x = activations(rows, 2 * columns, dtype)
        args = (x, fitting_scale(x), tiled, True)
        case = (rows, columns, dtype, tiled)
        assert_as_specified(compiled, "activation_quant", "silu_mul_nvfp4_quant", *args, case=case)


def test_add_rmsnorm_as_specified(compiled: str) -> None:
    """Also rows whose sum has more parts than a warp has threads."""
    shapes = [*SHAPES, (3, 8192), (2, 12304), (2, 40960)]
    for shape, dtype, tiled in product(shapes, two_byte_or_any(compiled), LAYOUTS):
        x, residual = activations(*shape, dtype), activations(*shape, dtype, seed=1)
        weight = activations(1, shape[1], dtype, seed=2).view(-1)
        args = (x, residual, weight, torch.tensor([100.0]), 1e-6, tiled, True)
        assert_as_specified(
            compiled,
            "activation_quant",
            "add_rmsnorm_nvfp4_quant",
            *args,
            case=(shape, dtype, tiled),
        )


def test_rmsnorm_is_close_to_torchs(kernels: object) -> None:
    """The specification's own order of summation is a sum of squares."""
    x, residual = activations(5, 4096, torch.bfloat16), activations(5, 4096, torch.bfloat16, seed=1)
    weight = torch.rand(4096).bfloat16()
    normed, total = call("reference", "activation_quant", "add_rmsnorm", x, residual, weight, 1e-6)
    expected = torch.nn.functional.rms_norm(total.double(), (4096,), weight.double(), 1e-6)
    torch.testing.assert_close(normed.double(), expected, rtol=2**-8, atol=0)


def test_silu_is_close_to_torchs(kernels: object) -> None:
    from nibble_kernels.exact import silu

    x = torch.cat((torch.linspace(-80, 80, 100_001), torch.tensor([0.0, -0.0, 1e30, -1e30, 1e-30])))
    torch.testing.assert_close(
        silu(x).double(), torch.nn.functional.silu(x.double()), rtol=4e-7, atol=1e-36
    )


def test_nan_and_infinity_show(compiled: str) -> None:
    """A NaN makes its block's scale NaN and no other's; infinity saturates."""
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    x[0, 5], x[0, 20], x[1, 40], x[1, 41] = float("nan"), float("inf"), float("-inf"), -0.0
    x[0, 6] = -x[0, 5]
    for tiled in LAYOUTS:
        assert_as_specified(
            compiled,
            "activation_quant",
            "nvfp4_quant",
            x,
            torch.tensor([1.0]),
            tiled,
            True,
            case=tiled,
        )
    scales = call(compiled, "activation_quant", "nvfp4_quant", x, torch.tensor([1.0]), False, True)[
        1
    ].float()
    assert scales.isnan().nonzero().tolist() == [[0, 0]]
    assert (scales[0, 1], scales[1, 2]) == (448, 448)


def test_senseless_global_scales_give_the_same_on_every_device(compiled: str) -> None:
    x = activations(3, 64, torch.bfloat16)
    for scale in (0.0, float("inf"), float("nan"), 1e38, 1e-38, -1.0):
        args = (x, torch.tensor([scale]), True, True)
        assert_as_specified(compiled, "activation_quant", "nvfp4_quant", *args, case=scale)


def test_no_rows(implementation: str) -> None:
    x, one = torch.empty(0, 64, dtype=torch.bfloat16), torch.ones(1)
    for tiled in LAYOUTS:
        codes, scales = call(implementation, "activation_quant", "nvfp4_quant", x, one, tiled, True)
        assert (codes.shape, scales.shape) == ((0, 32), (0, 4))


def test_rows_that_are_not_contiguous(compiled: str) -> None:
    wide = activations(20, 256, torch.bfloat16)
    for x in (wide[:, 64:192], wide[::3, :128], wide.view(4, 5, 256).transpose(0, 1)):
        assert_as_specified(
            compiled, "activation_quant", "nvfp4_quant", x, fitting_scale(wide), False, True
        )


def test_padding_of_tiled_scales_is_zero(compiled: str) -> None:
    """GEMMs read whole tiles; what torch.empty left there must not be in them."""
    from nibble_kernels.scale_layout import untile

    for _ in range(3):
        # For the allocator to hand out again
        torch.full((4096,), 255, dtype=torch.uint8, device=compiled)
        x = torch.ones(5, 48, dtype=torch.bfloat16)
        scales = call(compiled, "activation_quant", "nvfp4_quant", x, torch.ones(1), True, True)[1]
        linear = untile(scales, 128, 4).float()
        assert (linear[:5, :3] > 0).all()
        assert linear.count_nonzero() == 15


@pytest.mark.gpu
@pytest.mark.parametrize(
    "function", ["nvfp4_quant", "silu_mul_nvfp4_quant", "add_rmsnorm_nvfp4_quant"]
)
def test_approximate_reciprocals_move_few_codes_by_one(kernels: object, function: str) -> None:
    """Only quotients within an ulp or two of a tie may change, to the neighbour."""
    from nibble_kernels.conversions.reference import unpack

    x = activations(512, 4096, torch.bfloat16)
    others = (
        activations(512, 4096, torch.bfloat16, seed=1),
        torch.ones(4096, dtype=torch.bfloat16),
    )
    rest = (*others, fitting_scale(x), 1e-6) if "rmsnorm" in function else (fitting_scale(x),)
    exact = call("cuda", "activation_quant", function, x, *rest, False, True)
    approximate = call("cuda", "activation_quant", function, x, *rest, False, False)
    difference = (unpack(exact[0]).int() & 7) - (unpack(approximate[0]).int() & 7)
    scales = exact[1].view(torch.uint8).int() - approximate[1].view(torch.uint8).int()
    changed = (difference != 0).float().mean().item()
    assert (scales.abs().max() <= 1, difference.abs().max() <= 1, changed < 1e-3) == (
        True,
        True,
        True,
    ), changed


@pytest.mark.parametrize("columns", [8, 24, 100])
def test_rows_that_are_no_whole_blocks_are_refused(kernels: object, columns: int) -> None:
    from nibble_kernels.activation_quant import nvfp4_quant

    with pytest.raises(ValueError, match=f"blocks of 16 columns.*{columns}"):
        nvfp4_quant(torch.ones(2, columns, dtype=torch.bfloat16), torch.ones(1))


def test_wrong_arguments_are_refused_by_the_operators(compiled: str) -> None:
    x, one = torch.ones(2, 32, dtype=torch.bfloat16), torch.ones(1)
    with pytest.raises(RuntimeError, match="global_scale_inv must be one float32"):
        call(compiled, "activation_quant", "nvfp4_quant", x, torch.ones(2), True, True)
    with pytest.raises(RuntimeError, match="expected bfloat16"):
        call(compiled, "activation_quant", "nvfp4_quant", x.int(), one, True, True)
    with pytest.raises(RuntimeError, match="residual must have x's type"):
        call(
            compiled,
            "activation_quant",
            "add_rmsnorm_nvfp4_quant",
            x,
            x[:1],
            x[0],
            one,
            1e-6,
            True,
            True,
        )

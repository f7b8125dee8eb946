"""e4m3_decode_linear against float64. On the CPU it is the specification."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels.e4m3_cases import SCALES, e4m3_matrix, matrix_values
from tests.support.kernels.kernel_cases import activations, assert_rounded_once, assert_same_bits

SHAPES = [(16, 32), (48, 176), (272, 1040)]  # rows and columns of the weight
LARGE = [(12288, 2048), (2048, 4096), (5120, 6144), (1552, 17408)]
ROWS = (1, 2, 4, 7, 8, 9, 16, 17, 32, 33, 70)
ONE = torch.ones(1, dtype=torch.float64)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, kernels: Any) -> str:
    """On the CPU the specification computes; CUDA must be compiled."""
    assert request.param == "cpu" or kernels.implementations()["cuda"] == "compiled"
    return request.param


class Layer:
    """A random weight and its scales on a device, and its values in float64."""

    def __init__(self, device: str, rows: int, columns: int, scales: str) -> None:
        from nibble_kernels.e4m3_linear import prepare_e4m3_scales

        weight, scale, block = e4m3_matrix(rows, columns, scales)
        self.device, self.values = device, matrix_values(weight, scale)
        self.weight = weight.to(device)
        self.scales = prepare_e4m3_scales(self.weight, scale.to(device), block=block)

    def product(self, x: Tensor, **rest: Any) -> Tensor:
        """The result on the CPU."""
        from nibble_kernels.e4m3_linear import e4m3_decode_linear

        moved: dict[str, Any] = {
            key: value.to(self.device) if isinstance(value, Tensor) else value
            for key, value in rest.items()
        }
        return e4m3_decode_linear(x.to(self.device), self.weight, self.scales, **moved).cpu()


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(
    ("device", "shape"),
    [("cpu", shape) for shape in SHAPES]
    + [pytest.param("cuda", shape, marks=pytest.mark.gpu) for shape in (*SHAPES, *LARGE)],
)
def test_sums_are_rounded_once(
    kernels: object, device: str, shape: tuple[int, int], scales: str
) -> None:
    layer, bias = Layer(device, *shape, scales), torch.randn(shape[0]).bfloat16()
    x = activations(ROWS[-1], shape[1], torch.bfloat16)
    for rows in ROWS:
        y = layer.product(x[:rows], bias=bias)
        assert_rounded_once(y, x[:rows], layer.values, ONE, bias.double())


def test_every_code_is_exact(device: str) -> None:
    """One column at a time."""
    from nibble_kernels.e4m3_linear import e4m3_decode_linear, prepare_e4m3_scales

    codes = torch.arange(256, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    weight = codes[:, None].expand(-1, 64).contiguous().view(torch.float8_e4m3fn)
    scales = prepare_e4m3_scales(weight.to(device), torch.ones(1, device=device))
    x = torch.eye(64, dtype=torch.bfloat16)
    for rows in (1, 8, 16, 32, 64):
        y = e4m3_decode_linear(x[:rows].to(device), weight.to(device), scales).cpu()
        assert torch.equal(y.double() + 0.0, weight.double().T[:rows] + 0.0), rows


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("rows", [1, 5, 16, 20, 33])
def test_silu_mul_and_residual_come_before_the_only_rounding(
    device: str, scales: str, rows: int
) -> None:
    layer, x = Layer(device, 272, 528, scales), activations(rows, 528, torch.bfloat16) / 64
    residual = torch.randn(rows, 136).bfloat16()
    y = layer.product(x, silu_mul=True, residual=residual).double()
    gate, up = (x.double() @ layer.values.T).chunk(2, dim=-1)
    gate_size, up_size = (x.double().abs() @ layer.values.abs().T).chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gate) * up + residual.double()
    size = gate_size * up.abs() + up_size * (gate.abs() + gate_size * 2.0**-20)
    # exp is an approximation on the GPU.
    bound = exact.abs() * 2.0**-8 + (size + (gate * up).abs()) * 2.0**-18 + 1e-30
    assert ((y - exact).abs() <= bound).all()


def test_no_rows_and_more_dimensions(device: str) -> None:
    layer = Layer(device, 32, 256, "channel")
    assert layer.product(torch.empty(0, 256, dtype=torch.bfloat16)).shape == (0, 32)
    x = activations(6, 256, torch.bfloat16)
    y = layer.product(x.reshape(2, 3, 256))
    assert_same_bits((y.reshape(6, 32),), (layer.product(x),))


@pytest.mark.gpu
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_division_of_the_work_gives_the_sum(kernels: object, ranks: int, scales: str) -> None:
    layer, x = Layer("cuda", 1040, 3088, scales), activations(32, 3088, torch.bfloat16)
    for rows in (1, 12, 30):
        for phases in (1, 2, 5):
            y = layer.product(x[:rows], division=(ranks, phases))
            assert_rounded_once(y, x[:rows], layer.values, ONE)


@pytest.mark.gpu
def test_a_rows_result_does_not_depend_on_its_batch(kernels: object) -> None:
    """Within 4, 8, 16 and 32 rows."""
    layer, x = Layer("cuda", 2048, 4096, "channel"), activations(32, 4096, torch.bfloat16)
    for least, most in ((1, 4), (5, 8), (9, 16), (17, 32)):
        everything = layer.product(x[:most])
        assert_same_bits((layer.product(x[:least]),), (everything[:least],), most)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 16, 32])
def test_a_hundred_replays_of_a_graph_give_the_same_bits(kernels: object, rows: int) -> None:
    """One product after the other, as in a model: each begins while the last ends."""
    from nibble_kernels.e4m3_linear import e4m3_decode_linear

    layer = Layer("cuda", 4096, 4096, "block")
    x = activations(rows, 4096, torch.bfloat16).cuda()

    def chain() -> Tensor:
        y = x
        for _ in range(4):
            y = e4m3_decode_linear(
                y / y.norm(dim=-1, keepdim=True), layer.weight, layer.scales, residual=x
            )
        return y

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    x.copy_(activations(rows, 4096, torch.bfloat16, seed=3))
    expected = chain().cpu()
    for _ in range(100):
        graph.replay()
        assert_same_bits((y.cpu(),), (expected,))


@pytest.mark.gpu
def test_activations_and_weights_that_the_kernel_does_not_read_are_refused(kernels: object) -> None:
    layer = Layer("cuda", 32, 64, "tensor")
    with pytest.raises(RuntimeError, match="bfloat16 activations"):
        layer.product(torch.randn(2, 64).half())
    with pytest.raises(RuntimeError, match="is not what prepare_weight was given"):
        layer.product(torch.randn(2, 80).bfloat16())
    layer.weight = layer.weight.T.contiguous().T
    with pytest.raises(RuntimeError, match="rows one after the other"):
        layer.product(torch.randn(2, 64).bfloat16())


def test_weights_that_the_kernel_does_not_read_have_no_scales(kernels: object) -> None:
    from nibble_kernels.e4m3_linear import prepare_e4m3_scales

    weight, scale, block = e4m3_matrix(256, 256, "block")
    for bad, reason in (
        ((weight[:248], scale), "rows in 16s and columns in 16s; got 248 x 256"),
        ((weight[:, :136].contiguous(), scale), "columns in 16s"),
        ((weight.T, scale), "in another layout"),
        ((weight.float(), scale), "expected contiguous float8_e4m3fn"),
        ((weight, scale[:1]), "expected scales"),
    ):
        with pytest.raises(ValueError, match=reason):
            prepare_e4m3_scales(*bad, block=block)
    with pytest.raises(ValueError, match="blocks of 64 x 64 are not supported"):
        prepare_e4m3_scales(weight, scale, block=(64, 64))
    with pytest.raises(ValueError, match="4 scales do not fit"):
        prepare_e4m3_scales(weight, scale)
    weight.view(torch.uint8)[5, 9] = 0xFF
    with pytest.raises(ValueError, match="a weight is NaN"):
        prepare_e4m3_scales(weight, scale, block=block)


@pytest.mark.parametrize("scales", SCALES)
def test_the_operator_is_registered_soundly(device: str, scales: str) -> None:
    layer = Layer(device, 48, 96, scales)
    x = activations(5, 96, torch.bfloat16).to(device)
    arguments = (x, layer.weight, *layer.scales, None, None, True, [])
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    # torch's test_schema compares no float8 tensors.
    torch.library.opcheck(torch.ops.nibble.e4m3_decode_linear.default, arguments, test_utils=tests)

"""nvfp4_warpgroup_linear and when nvfp4_weight_linear takes it. On the CPU it is the specification;
on a GPU it needs SM90.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_nvfp4_gpu_linear import GLOBAL_SCALE, decode, one_of_each, prepared
from torch import Tensor

from tests.support.kernels.kernel_cases import (
    activations,
    assert_residual_comes_before_rounding,
    assert_rounded_once,
    assert_same_bits,
    packed_weight,
    values_of,
)

CHOICE = Path(__file__).parents[2] / "kernels/src/nibble_kernels/nvfp4_linear/weight_linear.cu"
SHAPES = [(16, 32), (24, 176), (136, 1056)]  # rows and columns of the weight
LARGE_SHAPES = [(1544, 2048), (520, 17408), (6144, 4096)]
ROWS = (1, 9, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 200, 257, 300)
BUCKETS = ((17, 32), (33, 64), (65, 128))  # a row's result does not depend on the others
# Tokens and rows of a unit: every form of warpgroup_division.h. The last two have no clusters.
FORMS = (
    (16, 192),
    (16, 256),
    (32, 192),
    (32, 256),
    (64, 192),
    (128, 128),
    (128, 192),
    (128, 256),
)
UNITS, CLUSTERS, RANGES = range(3)  # Sharing of warpgroup.cuh
ONLY_GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", ONLY_GPU])
def device(request: pytest.FixtureRequest, kernels: Any) -> str:
    if request.param == "cuda":
        require_sm90(kernels)
    return request.param


@pytest.fixture
def cuda(kernels: Any) -> str:
    require_sm90(kernels)
    return "cuda"


def require_sm90(kernels: Any) -> None:
    assert kernels.implementations()["cuda"] == "compiled"
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the warpgroup kernel is for SM90")


def warpgroup(x: Tensor, weight: Any, global_scale: float = GLOBAL_SCALE, **rest: Any) -> Tensor:
    """On the weight's device; the result on the CPU."""
    from nibble_kernels.nvfp4_linear.gpu import nvfp4_warpgroup_linear

    device = weight.codes.device
    moved: dict[str, Any] = {
        key: value.to(device) if isinstance(value, Tensor) else value for key, value in rest.items()
    }
    return nvfp4_warpgroup_linear(x.to(device), weight, global_scale, **moved).cpu()


def divisions(chunks: int) -> list[tuple[int, int, int, int]]:
    """Every division of the work into which `chunks` chunks of columns can be divided."""
    found = []
    for form in FORMS:
        found += [(*form, UNITS, 1), (*form, RANGES, 1)]
        if form not in ((128, 192), (128, 256)):
            found += [(*form, CLUSTERS, ranks) for ranks in range(2, min(8, chunks) + 1)]
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_code_under_every_scale_is_exact(device: str, dtype: torch.dtype) -> None:
    """Products, one column at a time, in every form."""
    codes, scales = one_of_each()
    expected = values_of(codes, scales).T + 0.0
    weight = prepared(device, codes, scales, native=dtype == torch.float16)
    for tokens, rows in FORMS:
        x = torch.eye(64, dtype=dtype).repeat(max(1, tokens // 64), 1)
        y = warpgroup(x, weight, 1.0, division=(tokens, rows, UNITS, 1))
        assert torch.equal(y.double() + 0.0, expected.repeat(len(x) // 64, 1)), (tokens, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("device", "shape"),
    [("cpu", shape) for shape in SHAPES]
    + [pytest.param("cuda", shape, marks=pytest.mark.gpu) for shape in (*SHAPES, *LARGE_SHAPES)],
    indirect=["device"],
)
def test_sums_are_rounded_once(device: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Any number of rows, with and without column factors and bias, as the operator divides."""
    codes, scales = packed_weight(*shape)
    w, weight = values_of(codes, scales), prepared(device, codes, scales, dtype == torch.float16)
    factors, bias = torch.rand(shape[0]) + 0.5, torch.randn(shape[0]).to(dtype)
    x = activations(ROWS[-1], shape[1], dtype)
    for rows in ROWS if device == "cuda" else ROWS[:2]:
        y = warpgroup(x[:rows], weight)
        assert_rounded_once(y, x[:rows], w, torch.tensor(GLOBAL_SCALE).double())
        y = warpgroup(x[:rows], weight, column_scale=factors, bias=bias)
        assert_rounded_once(y, x[:rows], w, GLOBAL_SCALE * factors.double(), bias.double())


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(1032, 3088), (264, 1040), (4104, 528)])
def test_every_division_of_the_work_gives_the_sum(cuda: str, rows: int, columns: int) -> None:
    codes, scales = packed_weight(rows, columns)
    weight, w = prepared(cuda, codes, scales), values_of(codes, scales)
    x = activations(140, columns, torch.bfloat16)
    for division in divisions(-(-columns // 128)):
        for tokens in (division[0] - 3, 140):
            y = warpgroup(x[:tokens], weight, division=division)
            assert_rounded_once(y, x[:tokens], w, torch.tensor(GLOBAL_SCALE).double())


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_residual_is_added_before_the_only_rounding_in_every_division(
    cuda: str, form: tuple[int, int]
) -> None:
    rows, columns = 1032, 1040
    weight = prepared(cuda, *packed_weight(rows, columns))
    x = activations(140, columns, torch.bfloat16)
    for division in divisions(-(-columns // 128)):
        if division[:2] == form:
            options: dict[str, Any] = {"division": division}
            assert_residual_comes_before_rounding(
                lambda r, options=options: warpgroup(x, weight, residual=r, **options), division
            )


def test_silu_mul_comes_before_the_only_rounding(device: str) -> None:
    codes, scales = packed_weight(272, 512)
    weight, x = prepared(device, codes, scales), activations(140, 512, torch.bfloat16)
    gate, up = (1e-4 * x.double() @ values_of(codes, scales).T).chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gate) * up
    bound = exact.abs() * 2.0**-8 + 2.0**-18 * (gate * up).abs() + 1e-6
    for rows in (9, 20, 60, 120, 140):
        y = warpgroup(x[:rows], weight, 1e-4, silu_mul=True).double()
        assert ((y - exact[:rows]).abs() <= bound[:rows]).all(), rows


def test_activations_keep_their_range(device: str) -> None:
    codes, scales = packed_weight(32, 256)
    x = torch.randn(30, 256) * torch.tensor([1e30, 1.0, 1e-30]).repeat(10)[:, None]
    y = warpgroup(x.bfloat16(), prepared(device, codes, scales), 1.0)
    assert_rounded_once(y, x.bfloat16(), values_of(codes, scales), torch.ones(()).double())


def test_nan_and_infinity_stay_in_their_row(device: str) -> None:
    x = torch.randn(70, 256).bfloat16()
    x[1, 3], x[66, 200] = float("nan"), float("inf")
    y = warpgroup(x, prepared(device, *packed_weight(32, 256)))
    is_finite = torch.ones(70, dtype=torch.bool)
    is_finite[[1, 66]] = False
    assert y[is_finite].isfinite().all() and not y[~is_finite].isfinite().any()


def test_no_rows(device: str) -> None:
    weight = prepared(device, *packed_weight(32, 256))
    assert warpgroup(torch.empty(0, 256, dtype=torch.bfloat16), weight).shape == (0, 32)


def test_more_dimensions_and_strided_rows(device: str) -> None:
    codes, scales = packed_weight(48, 256)
    x = activations(48, 512, torch.bfloat16).view(2, 24, 512)[:, :, ::2]
    y = warpgroup(x, prepared(device, codes, scales))
    assert y.shape == (2, 24, 48)
    factor = torch.tensor(GLOBAL_SCALE).double()
    assert_rounded_once(y.flatten(0, 1), x.flatten(0, 1), values_of(codes, scales), factor)


@pytest.mark.gpu
def test_codes_for_another_type_are_refused(cuda: str) -> None:
    codes, scales = packed_weight(32, 64)
    for dtype, native in ((torch.float16, False), (torch.bfloat16, True)):
        with pytest.raises(RuntimeError, match="prepared for"):
            warpgroup(torch.randn(20, 64).to(dtype), prepared(cuda, codes, scales, native))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2048, 5120), (6144, 4096), (4096, 12288)])
def test_a_rows_result_does_not_depend_on_its_batch(cuda: str, shape: tuple[int, int]) -> None:
    """Within a bucket of rows."""
    codes, scales = packed_weight(*shape)
    weight, x = prepared(cuda, codes, scales), activations(128, shape[1], torch.bfloat16)
    for least, most in BUCKETS:
        everything = warpgroup(x[:most], weight)
        for first, rows in ((0, least), (most - least, least), (1, most - 1)):
            some = warpgroup(x[first : first + rows], weight)
            assert_same_bits((some,), (everything[first : first + rows],), (most, first, rows))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [9, 24, 48, 100, 300])
def test_a_hundred_replays_of_a_graph_give_the_same_bits(cuda: str, rows: int) -> None:
    """One product after the other, as in a model: each begins while the last ends."""
    from nibble_kernels.nvfp4_linear.gpu import nvfp4_warpgroup_linear

    weights = [prepared(cuda, *packed_weight(*shape)) for shape in ((4096, 2048), (2048, 4096))]
    x = activations(rows, 2048, torch.bfloat16).cuda()

    def chain() -> Tensor:
        y = x
        for _ in range(3):
            for weight in weights:
                y = nvfp4_warpgroup_linear(y / y.norm(dim=-1, keepdim=True), weight, 1e-3)
        return y

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    x.copy_(activations(rows, 2048, torch.bfloat16, seed=3))
    expected = chain().cpu()
    for _ in range(100):
        graph.replay()
        assert_same_bits((y.cpu(),), (expected,))


def constant_of(name: str) -> int:
    """A constant of weight_linear.cu."""
    found = re.search(rf"{name} = (?:int64_t\{{1\}} << )?(\d+)[,;]", CHOICE.read_text())
    assert found, name
    return int(found[1])


def few_products() -> int:
    return 1 << constant_of("kFewProducts")


def test_the_operators_choice_has_the_limits_that_trials_know() -> None:
    from nibble_kernels.nvfp4_linear import gpu

    assert constant_of("kMostDecodeRows") == gpu.MAX_DECODE_ROWS
    assert constant_of("kMostDecodeRowsSm90") == gpu.MAX_DECODE_ROWS_SM90
    assert constant_of("kMostWarpgroupRows") == gpu.MAX_WARPGROUP_ROWS


@pytest.mark.gpu
def test_the_linear_operator_chooses_by_the_number_of_rows(cuda: str) -> None:
    from nibble_kernels.nvfp4_linear.gpu import (
        MAX_DECODE_ROWS_SM90,
        MAX_WARPGROUP_ROWS,
        nvfp4_weight_linear,
    )

    codes, scales = packed_weight(1032, 2048)
    weight, w = prepared(cuda, codes, scales), values_of(codes, scales)
    many = few_products() // (1032 * 2048)
    x = activations(many + 1, 2048, torch.bfloat16)

    def linear(rows: int, batch_invariant: bool = False) -> Tensor:
        few = x[:rows].cuda()
        return nvfp4_weight_linear(few, weight, GLOBAL_SCALE, batch_invariant=batch_invariant).cpu()

    few = MAX_DECODE_ROWS_SM90
    assert_same_bits((linear(few),), (decode(x[:few], weight),))
    for rows in (few + 1, 64, 512, MAX_WARPGROUP_ROWS, many):
        assert_same_bits((linear(rows),), (warpgroup(x[:rows], weight),), rows)
    for rows in (few + 1, 512):
        invariant = decode(x[:rows], weight, batch_invariant=True)
        assert_same_bits((linear(rows, batch_invariant=True),), (invariant,), rows)
    assert_rounded_once(linear(len(x)), x, w, torch.tensor(GLOBAL_SCALE).double())
    assert not torch.equal(linear(len(x)), warpgroup(x, weight))


def test_the_operator_is_registered_soundly(device: str) -> None:
    """torch's own check: schema, fake implementation, autograd registration, dynamic shapes."""
    x = activations(20, 96, torch.bfloat16).to(device)
    arguments = (x, *prepared(device, *packed_weight(48, 96)), 1.0, None, None, None, True, [])
    torch.library.opcheck(torch.ops.nibble.nvfp4_warpgroup_linear.default, arguments)

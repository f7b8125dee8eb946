"""The source of the experts' W4A4 kernels (nvfp4_moe/w4a4.cuh) without a GPU: compiled by g++, with
lanes that take turns, products emulated as on every target before SM12x (nibble/mma_fp4.cuh).

Each step is compared with float64 of what the step before left: quantized rows bit for bit, sums
within their roundings. Late copies find a stage that is written too early, immediate ones what is
read before it is there.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.changes import OPERATORS
from tests.support.kernels.emulated import compile_on_the_host, needs_compiler, pointers
from tests.support.kernels.kernel_cases import assert_same_bits
from tests.support.kernels.w4a4_experts import (
    FUNCTIONS,
    Layer,
    duplicates,
    nowhere,
    of_a_map,
    one_expert,
    one_token_each,
    random_ids,
)

pytestmark = [needs_compiler, pytest.mark.when_changed(*OPERATORS)]

CHUNK = 128
BLOCK_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # of a chunk's scales: first those of one instruction
# Tokens of a tile, thread blocks, tokens, experts a token, experts, hidden, intermediate; who has
# which expert. Rows and columns that fill no unit and no chunk, several tiles of an expert, more
# chunks than stages, units of several thread blocks, and fewer chunks than blocks.
CASES = [
    ((16, 3, 19, 2, 5, 176, 48), random_ids),
    ((16, 5, 4, 4, 64, 272, 80), random_ids),
    ((16, 4, 1, 16, 512, 144, 48), random_ids),
    ((16, 4, 2, 1, 60, 128, 1408), random_ids),
    ((16, 2, 3, 1, 2, 1424, 16), random_ids),
    ((16, 3, 40, 1, 64, 144, 48), one_expert),
    ((16, 3, 3, 4, 256, 144, 48), one_token_each),
    ((16, 3, 12, 4, 6, 144, 48), duplicates),
    ((16, 2, 9, 3, 8, 144, 48), of_a_map),
    ((16, 2, 3, 2, 4, 144, 48), nowhere),
    ((16, 7, 1, 1, 2, 272, 16), random_ids),
    ((32, 3, 50, 2, 3, 272, 80), random_ids),
    ((64, 4, 70, 1, 2, 144, 144), random_ids),
    ((128, 3, 131, 1, 1, 144, 80), one_expert),
]
NAMES = [f"{case}, {choose.__name__}" for case, choose in CASES]
LATE = (0, 4, 11)


class Steps(NamedTuple):
    """What the kernels leave. `rows`: codes and scales of x's and the intermediate's rows."""

    places: Tensor
    rows: list[tuple[Tensor, Tensor]]
    inner: Tensor
    products: Tensor
    out: Tensor


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, kernels: object) -> ctypes.CDLL:
    return compile_on_the_host("w4a4_experts.cpp", tmp_path_factory.mktemp("emulator"))


def run(library: ctypes.CDLL, case: tuple[int, ...], layer: Layer, late: bool = True) -> Steps:
    form, blocks = case[:2]
    pairs, here = layer.ids.numel(), len(layer.order)
    most_tiles = min(layer.experts + pairs // form, pairs)
    quantized = [
        torch.zeros(most_tiles, -(-columns // CHUNK), form * (CHUNK // 2 + 8), dtype=torch.uint8)
        for columns in layer.columns
    ]
    inner, products, out = (
        torch.full((rows, columns), float("nan"), dtype=torch.bfloat16)
        for rows, columns in (
            (pairs, layer.inner),
            (pairs, layer.hidden),
            (layer.tokens, layer.hidden),
        )
    )
    places = torch.zeros(pairs, 2, dtype=torch.int32)
    arguments: list[Any] = [late, form, blocks, *pointers(layer.x, layer.ids, layer.router)]
    arguments += [layer.tokens, layer.topk, layer.experts, layer.hidden, layer.inner]
    for which, prepared in enumerate(layer.prepared):
        scale, bias = layer.input_scales[which], layer.biases[which]
        arguments += pointers(*prepared[:3], scale, bias)
    arguments += pointers(*quantized, inner, products, out, places)
    arguments += [FUNCTIONS.index(layer.function), layer.gated]
    arguments += [ctypes.c_float(one) for one in layer.activation]
    library.multiply_w4a4_experts_on_the_host(*arguments)
    places = places[:here]
    rows = [
        rows_of(one, places[:, 1].long(), form, columns)
        for one, columns in zip(quantized, layer.columns, strict=True)
    ]
    return Steps(places, rows, inner[:here], products, out)


def rows_of(tiles: Tensor, slots: Tensor, form: int, columns: int) -> tuple[Tensor, Tensor]:
    """Codes and scales row by row; both must be zero past the last column."""
    split = form * CHUNK // 2
    codes = tiles[:, :, :split].unflatten(2, (form, -1)).transpose(1, 2).flatten(0, 1).flatten(1)
    scales = torch.empty(*tiles.shape[:2], form, 8, dtype=torch.uint8)
    scales[..., BLOCK_ORDER] = tiles[:, :, split:].unflatten(2, (form, -1))
    scales = scales.transpose(1, 2).flatten(0, 1).flatten(1)
    codes, scales = codes[slots], scales[slots]
    assert not codes[:, columns // 2 :].any() and not scales[:, columns // 16 :].any()
    return codes[:, : columns // 2], scales[:, : columns // 16]


def assert_each_step(layer: Layer, found: Steps, form: int) -> None:
    order, experts = layer.order, layer.expert_of
    assert found.places[:, 0].tolist() == order.tolist()
    counts = experts.bincount(minlength=layer.experts)
    first_tiles = (-(-counts // form)).cumsum(0) - (-(-counts // form))
    place = torch.arange(len(order)) - (counts.cumsum(0) - counts)[experts]
    assert found.places[:, 1].tolist() == (first_tiles[experts] * form + place).tolist()

    inputs = (layer.x[order // layer.topk], found.inner)
    for which, rows in enumerate(inputs):
        codes, scales = layer.quantized(which, rows)
        assert_same_bits(found.rows[which], (codes, scales.view(torch.uint8)), f"rows {which}")
    exact, bound = layer.exact_inner()
    assert ((found.inner.double() - exact).abs() <= bound).all()
    exact, bound = layer.exact_products(found.inner)
    assert ((found.products[order].double() - exact).abs() <= bound).all()
    others = torch.ones(layer.ids.numel(), dtype=torch.bool)
    others[order] = False
    assert found.products[others].isnan().all()
    assert_same_bits((found.out,), (layer.sum_of(found.products),))


@pytest.mark.parametrize(("case", "choose"), CASES, ids=NAMES)
def test_each_step_is_exact_or_rounded_once(
    library: ctypes.CDLL, case: tuple[int, ...], choose: Any
) -> None:
    layer = Layer(*case[2:], choose=choose)
    assert_each_step(layer, run(library, case, layer), case[0])


@pytest.mark.parametrize(
    ("function", "gated"), [("silu", True), ("gelu_tanh", True), ("relu2", False)]
)
def test_activations_and_biases(library: ctypes.CDLL, function: str, gated: bool) -> None:
    case = (16, 3, 12, 2, 4, 144, 48)
    layer = Layer(*case[2:], function=function, gated=gated, is_biased=True)
    assert_each_step(layer, run(library, case, layer), case[0])


@pytest.mark.parametrize(("case", "choose"), [CASES[i] for i in LATE], ids=[NAMES[i] for i in LATE])
def test_late_copies_do_not_change_a_bit(
    library: ctypes.CDLL, case: tuple[int, ...], choose: Any
) -> None:
    layer = Layer(*case[2:], choose=choose)
    now, late = (run(library, case, layer, late=late) for late in (False, True))
    assert_same_bits((now.out, now.inner, now.places), (late.out, late.inner, late.places))


def test_the_operator_on_the_cpu_is_what_the_kernels_compute(library: ctypes.CDLL) -> None:
    """But for codes and roundings of the intermediate that float32 sums in another order change."""
    from nibble_kernels.nvfp4_moe.w4a4 import nvfp4_w4a4_moe

    case = CASES[0][0]
    layer = Layer(*case[2:])
    found = run(library, case, layer).out.double()
    expected = nvfp4_w4a4_moe(
        layer.x, layer.router, layer.ids, *layer.prepared, *layer.input_scales
    ).double()
    assert ((found - expected).norm(dim=-1) <= 0.02 * expected.norm(dim=-1)).all()


def test_a_tile_has_room_for_twice_the_average(library: ctypes.CDLL) -> None:
    tokens = library.tokens_of_a_w4a4_tile
    cases = ((1, 512), (512, 64), (576, 64), (1024, 64), (2048, 64), (2112, 64), (10**6, 8))
    found = [tokens(pairs, experts) for pairs, experts in cases]
    assert found == [16, 16, 32, 32, 64, 128, 128]


@pytest.mark.parametrize("tokens", [1, 64, 700, 8192])
@pytest.mark.parametrize(
    "shape", [(128, 8, 2048, 768, 2), (256, 8, 2048, 512, 2), (8, 2, 1040, 176, 1)]
)
def test_the_plan_counts_the_workspace(
    library: ctypes.CDLL, shape: tuple[int, ...], tokens: int
) -> None:
    from nibble.plan.w4a4_memory import expert_bytes

    experts, chosen, hidden, inner, _ = shape
    library.w4a4_workspace_bytes.restype = ctypes.c_int64
    found = library.w4a4_workspace_bytes(tokens * chosen, experts, hidden, inner, hidden, 48)
    assert found == expert_bytes(shape, tokens, 48)

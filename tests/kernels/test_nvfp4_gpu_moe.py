"""nvfp4_moe_decode_linear: every pair of a token and an expert, experts of other processes, both
products of an MLP.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.changes import OPERATORS
from tests.support.kernels.kernel_cases import activations, packed_weight, values_of

EXPERTS, OUTPUTS, COLUMNS = 6, 48, 416
GLOBAL_SCALES = torch.rand(EXPERTS, 2, generator=torch.Generator().manual_seed(1)) * 1e-3 + 1e-4


def experts_of(outputs: int = OUTPUTS, columns: int = COLUMNS) -> tuple[Tensor, Tensor]:
    parts = [packed_weight(outputs, columns, seed) for seed in range(EXPERTS)]
    codes, scales = zip(*parts, strict=True)
    return torch.stack(codes), torch.stack(scales)


def prepared(device: str, weight: tuple[Tensor, Tensor], global_scales: Tensor) -> Any:
    from nibble_kernels.nvfp4_moe.weight import prepare_experts

    codes, scales = (part.to(device) for part in weight)
    return prepare_experts(codes, scales, global_scales.to(device), native=False)


def choices(tokens: int, topk: int) -> Tensor:
    """Different experts for each token; some of another process."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.stack(
        [torch.randperm(EXPERTS + 2, generator=generator)[:topk] for _ in range(tokens)]
    )
    return torch.where(ids == EXPERTS + 1, -1, ids).int()


def expected_sums(x: Tensor, codes: Tensor, scales: Tensor, ids: Tensor) -> Tensor:
    """[pairs, N] in float64, without the package's code; zeros for experts of other processes."""
    sums = torch.zeros(ids.numel(), codes.shape[1], dtype=torch.float64)
    inputs = x.double().repeat_interleave(ids.numel() // len(x), 0)
    for pair, expert in enumerate(ids.flatten().tolist()):
        if 0 <= expert < EXPERTS:
            factors = GLOBAL_SCALES[expert].double().repeat_interleave(codes.shape[1] // 2)
            sums[pair] = inputs[pair] @ values_of(codes[expert], scales[expert]).T * factors
    return sums


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, kernels: Any) -> str:
    assert request.param == "cpu" or kernels.implementations()["cuda"] == "compiled"
    return request.param


@pytest.mark.parametrize(("tokens", "topk"), [(1, 1), (1, 6), (3, 2), (8, 6), (9, 5), (16, 4)])
@pytest.mark.parametrize("by_pair", [False, True])
def test_each_pair_gets_its_experts_product(
    device: str, tokens: int, topk: int, by_pair: bool
) -> None:
    from nibble_kernels.nvfp4_moe.gpu import nvfp4_moe_decode_linear
    from nibble_kernels.nvfp4_moe.weight import prepare_experts

    codes, scales = experts_of()
    ids, weights = choices(tokens, topk), torch.rand(tokens, topk)
    x = activations(tokens * topk if by_pair else tokens, COLUMNS, torch.bfloat16)
    expected = expected_sums(x, codes, scales, ids)
    for native in (False, True):
        experts = prepare_experts(
            codes.to(device), scales.to(device), GLOBAL_SCALES.to(device), native
        )
        y = nvfp4_moe_decode_linear(
            x.to(device), experts, ids.to(device), topk_weights=weights.to(device)
        )
        wanted = expected * weights.double().flatten()[:, None]
        size = x.float().abs().sum(-1).max() * 2688 * GLOBAL_SCALES.max()
        assert ((y.cpu().double() - wanted).abs() <= wanted.abs() * 2.0**-8 + size * 2.0**-20).all()
        assert not y.cpu()[((ids < 0) | (ids >= EXPERTS)).flatten()].any()


def test_silu_mul_joins_gate_and_up_with_their_own_global_scales(device: str) -> None:
    from nibble_kernels.nvfp4_moe.gpu import nvfp4_moe_decode_linear
    from nibble_kernels.nvfp4_moe.weight import prepare_experts

    codes, scales = experts_of()
    ids, x = choices(5, 3), activations(5, COLUMNS, torch.bfloat16) / 16
    experts = prepare_experts(
        codes.to(device), scales.to(device), GLOBAL_SCALES.to(device), native=False
    )
    y = nvfp4_moe_decode_linear(x.to(device), experts, ids.to(device), silu_mul=True).cpu().double()
    gate, up = expected_sums(x, codes, scales, ids).chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gate) * up
    assert ((y - exact).abs() <= exact.abs() * 2.0**-8 + 2.0**-17 * (gate * up).abs() + 1e-5).all()


def test_prepared_experts_have_a_global_scale_for_each_half(kernels: object) -> None:
    from nibble_kernels.nvfp4_moe.weight import prepare_experts

    codes, scales = experts_of()
    one = prepare_experts(codes, scales, GLOBAL_SCALES[:, 0], native=True)
    assert torch.equal(one.global_scales, GLOBAL_SCALES[:, :1].expand(-1, 2))
    assert one.scales.shape == (EXPERTS, 3, 4, 32, 4)


@pytest.mark.when_changed(*OPERATORS)
@pytest.mark.parametrize(("tokens", "topk"), [(1, 6), (7, 3), (40, 4), (129, 2), (300, 5)])
def test_a_layer_of_experts_adds_up_its_pairs(device: str, tokens: int, topk: int) -> None:
    """Decode kernels 64 pairs at a time, and above 128 tokens torch; experts of other processes
    add nothing.
    """
    from nibble_kernels.nvfp4_moe.gpu import nvfp4_weight_moe

    hidden, inner = 96, 64
    (w13, w13_scales), (w2, w2_scales) = experts_of(2 * inner, hidden), experts_of(hidden, inner)
    ids, weights = choices(tokens, topk), torch.rand(tokens, topk)
    x = activations(tokens, hidden, torch.bfloat16) / 16
    gate, up = expected_sums(x, w13, w13_scales, ids).chunk(2, dim=-1)
    h = torch.nn.functional.silu(gate) * up
    # w2's upper and lower half have one scale: its first.
    w2_factors = GLOBAL_SCALES[:, 0]
    y = torch.zeros(ids.numel(), hidden, dtype=torch.float64)
    for pair, expert in enumerate(ids.flatten().tolist()):
        if 0 <= expert < EXPERTS:
            y[pair] = (
                h[pair] @ values_of(w2[expert], w2_scales[expert]).T * w2_factors[expert].double()
            )
    expected = (y * weights.double().flatten()[:, None]).unflatten(0, (tokens, topk)).sum(1)
    first = prepared(device, (w13, w13_scales), GLOBAL_SCALES)
    second = prepared(device, (w2, w2_scales), w2_factors)
    found = (
        nvfp4_weight_moe(x.to(device), weights.to(device), ids.to(device), first, second)
        .cpu()
        .double()
    )
    assert (
        found - expected
    ).norm() / expected.norm() < 0.006  # each of several roundings to bfloat16 is 2^-9 at most


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "topk"), [(1, 8), (3, 1), (5, 7), (2, 16), (4, 10)])
def test_products_are_added_up_in_the_order_of_the_choices(
    device: str, tokens: int, topk: int, dtype: torch.dtype
) -> None:
    """Those of other processes' experts are not read."""
    from nibble_kernels.nvfp4_moe.gpu import nvfp4_moe_add_up

    generator = torch.Generator().manual_seed(topk)
    products = torch.randn(tokens * topk, 264, generator=generator).to(dtype)
    ids = torch.randint(-1, 17, (tokens, topk), generator=generator, dtype=torch.int32)
    is_here = ((ids >= 0) & (ids < 16)).flatten()
    given = torch.where(is_here[:, None], products, torch.nan)
    found = nvfp4_moe_add_up(given.to(device), ids.to(device), 16).cpu()
    expected = torch.zeros(tokens, 264)
    for choice in (products * is_here[:, None]).float().unflatten(0, (tokens, topk)).unbind(1):
        expected += choice
    if device == "cuda":
        assert torch.equal(found, expected.to(dtype))
    torch.testing.assert_close(found, expected.to(dtype))


def test_all_experts_are_dequantized_at_once(device: str) -> None:
    from nibble_kernels.nvfp4_linear.gpu import nvfp4_dequantize_weight
    from nibble_kernels.nvfp4_linear.weight import PreparedWeight
    from nibble_kernels.nvfp4_moe.weight import prepare_experts

    codes, scales = experts_of()
    expected = torch.stack([values_of(*expert) for expert in zip(codes, scales, strict=True)])
    for native in (False, True):
        experts = prepare_experts(
            codes.to(device), scales.to(device), GLOBAL_SCALES.to(device), native
        )
        parts = PreparedWeight(experts.codes, experts.scales, experts.rows, native)
        like = torch.empty(0, dtype=torch.bfloat16, device=device)
        assert torch.equal(
            nvfp4_dequantize_weight(parts, COLUMNS, like).cpu().double() + 0.0, expected + 0.0
        )


def test_the_operators_are_registered_soundly(device: str) -> None:
    from nibble_kernels.nvfp4_moe.grouped import NOT_SHARED, SILU
    from nibble_kernels.nvfp4_moe.weight import prepare_experts

    codes, scales = experts_of()
    experts = prepare_experts(
        codes.to(device), scales.to(device), GLOBAL_SCALES.to(device), native=False
    )
    x, ids = activations(4, COLUMNS, torch.bfloat16).to(device), choices(4, 2).to(device)
    arguments = (x, *experts[:3], ids, None, OUTPUTS, False, True)
    torch.library.opcheck(torch.ops.nibble.nvfp4_moe_decode_linear.default, arguments)
    inner = prepared(device, experts_of(96, 32), GLOBAL_SCALES)
    outer = prepared(device, experts_of(32, 48), GLOBAL_SCALES)
    x = activations(4, 32, torch.bfloat16).to(device)
    parts = (*inner[:3], None, inner.rows, *outer[:3], None, outer.rows)
    layer = (x, torch.rand(4, 2, device=device), ids, *parts, False, *SILU, *NOT_SHARED)
    torch.library.opcheck(torch.ops.nibble.nvfp4_weight_moe.default, layer)


def test_experts_prepared_some_at_a_time_are_those_prepared_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Temporary tensors of a whole layer would not fit beside a model."""
    from nibble_kernels.nvfp4_linear.weight import prepare_weight
    from nibble_kernels.nvfp4_moe import weight

    codes, scales = experts_of(24, 160)
    monkeypatch.setattr(weight, "_PREPARED_BYTES", 4 * codes[0].numel())
    experts = weight.prepare_experts(codes, scales, torch.ones(EXPERTS), native=False)
    for number in range(EXPERTS):
        alone = prepare_weight(codes[number], scales[number], native=False)
        assert torch.equal(experts.codes[number], alone.codes)
        assert torch.equal(experts.scales[number], alone.scales)

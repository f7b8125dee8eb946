"""Global scales of fused layers, brought to one: which values do the merged tensors mean?"""

import json
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.paths import VECTORS


def vectors(name: str) -> list:
    return json.loads((VECTORS / name).read_text())["vectors"]


def e4m3(*values: float) -> torch.Tensor:
    return torch.tensor(values).to(torch.float8_e4m3fn)


def random_scales(rows: int, blocks: int, seed: int, low: int = 1) -> torch.Tensor:
    """Any finite positive E4M3 from the byte `low` on."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, 0x7F, (rows, blocks), generator=generator, dtype=torch.uint8).view(
        torch.float8_e4m3fn
    )


def in_use(scales: torch.Tensor) -> torch.Tensor:
    """Codes [..., K/2] none of which is 0, for block scales [..., K/16]."""
    return torch.full((*scales.shape[:-1], scales.shape[-1] * 8), 0x22, dtype=torch.uint8)


def meaning(merged: tuple) -> torch.Tensor:
    """The multiplier of each block in float64."""
    scales, global_scale, column = merged
    factor = 1.0 if column is None else column.double()[:, None]
    return scales.double() * global_scale.double() * factor


@pytest.fixture
def merge(kernels: ModuleType) -> ModuleType:
    from nibble_kernels import merge

    return merge


def test_a_ratio_folds_exactly_where_the_vectors_say_so(merge: ModuleType) -> None:
    for byte, ratio, encoded, exact, _ in vectors("e4m3_rescale.json"):
        scales = torch.tensor([[byte]], dtype=torch.uint8).view(torch.float8_e4m3fn)
        folded = merge.fold(scales, (ratio, 1.0))
        assert (folded is not None) == exact, (byte, ratio)
        if folded is not None:
            assert folded.view(torch.uint8).item() == encoded


def test_equal_scales_change_nothing(merge: ModuleType) -> None:
    scales = random_scales(48, 8, seed=1)
    merged = merge.merge_scales(scales, torch.tensor([3e-5, 3e-5]), [32, 16])
    assert merged.scales is scales  # nothing is copied
    assert merged.column_scale is None
    assert merged.global_scale == torch.tensor(3e-5)


def test_powers_of_two_fold_into_the_block_scales(merge: ModuleType) -> None:
    scales = random_scales(48, 8, seed=2, low=0x40)
    merged = merge.merge_scales(scales, torch.tensor([2e-4, 1e-4]), [32, 16])
    assert merged.column_scale is None
    expected = scales.double() * torch.tensor([2e-4] * 32 + [1e-4] * 16).double()[:, None]
    assert torch.equal(meaning(merged), expected)


@pytest.mark.parametrize("ratio", [2.9, 0.37, 1.0001, 3.0])
def test_any_ratio_keeps_every_value(merge: ModuleType, ratio: float) -> None:
    scales = random_scales(48, 8, seed=3)
    own = torch.tensor([1.3e-4, 1.3e-4 * ratio, 7e-5])
    merged = merge.merge_scales(scales, own, [16, 16, 16])
    expected = scales.double() * own.double().repeat_interleave(16)[:, None]
    assert ((meaning(merged) / expected - 1).abs().max()) < 2**-23
    assert merged.column_scale is not None


def test_a_part_that_folds_needs_no_column_factor_beside_one_that_does_not(
    merge: ModuleType,
) -> None:
    scales = random_scales(48, 8, seed=4, low=0x40)
    merged = merge.merge_scales(scales, torch.tensor([4e-5, 1.7e-5, 2e-5]), [16, 16, 16])
    assert merged.column_scale is not None
    assert (merged.column_scale[:16] == 1).all() and (merged.column_scale[32:] == 1).all()
    assert (merged.column_scale[16:32] != 1).all()


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_of_tensor_parallelism_mean_what_the_whole_layer_means(
    merge: ModuleType, ranks: int
) -> None:
    own, widths = torch.tensor([1.3e-4, 4e-5, 7e-5]), [32, 16, 16]
    parts = [random_scales(width, 8, seed=20 + i) for i, width in enumerate(widths)]
    for rank in range(ranks):
        mine = [part.chunk(ranks)[rank] for part in parts]
        merged = merge.merge_scales(torch.cat(mine), own, [len(part) for part in mine])
        factors = own.double().repeat_interleave(torch.tensor([len(part) for part in mine]))
        expected = torch.cat(mine).double() * factors[:, None]
        assert (meaning(merged) / expected - 1).abs().max() < 2**-23


@pytest.mark.parametrize("bad", [float("nan"), 0.0, -1e-4, float("inf")])
def test_a_global_scale_that_is_no_positive_number_is_refused(
    merge: ModuleType, bad: float
) -> None:
    with pytest.raises(merge.ScaleError, match="finite and positive"):
        merge.merge_scales(random_scales(32, 4, seed=5), torch.tensor([1e-4, bad]), [16, 16])


def test_rows_that_marlin_would_drop_are_lifted_exactly(merge: ModuleType) -> None:
    scales = torch.cat([random_scales(8, 8, seed=6, low=0x60), random_scales(8, 8, seed=7)])
    scales[8:] = e4m3(2**-9, 3 * 2**-9, 0.125, 0.0, 7 * 2**-9, 0.5, 2**-7, 1.0)
    assert merge.marlin_drops(scales.float()).any()
    merged = merge.merge_scales(scales, torch.tensor([1e-4]), [16], in_use(scales))
    assert not merge.marlin_drops(merged.scales.float()).any()
    assert torch.equal(meaning(merged), scales.double() * torch.tensor(1e-4).double())


def test_a_row_that_marlin_cannot_hold_is_refused(merge: ModuleType) -> None:
    scales = random_scales(4, 8, seed=8, low=0x60)
    scales[2, :2] = e4m3(448.0, 2**-9)
    with pytest.raises(merge.ScaleError, match=r"1 of 4 rows .* humming"):
        merge.merge_scales(scales, torch.tensor([1e-4]), [4], in_use(scales))


def test_blocks_of_zeros_need_no_scale(merge: ModuleType) -> None:
    codes = torch.zeros(4, 32, dtype=torch.uint8)
    codes[:, 8:] = 0x31
    codes[0, :8] = 0x88  # -0
    codes[1, 3] = 0x10
    scales = merge.without_idle_blocks(torch.ones(4, 4).to(torch.float8_e4m3fn), codes).float()
    assert scales.tolist() == [[0, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]]


@pytest.mark.parametrize("divisors", [False, True])
def test_a_row_with_a_block_of_zeros_is_held_by_marlin_whatever_its_scale(
    merge: ModuleType, divisors: bool
) -> None:
    from nibble.engine.plugin.layers import merge_layer

    layer: Any = torch.nn.Module()
    layer.weight_scale = torch.nn.Parameter(
        random_scales(4, 8, seed=8, low=0x60), requires_grad=False
    )
    layer.weight_scale.data[2, :2] = e4m3(448.0, 2**-9)
    codes = torch.full((4, 64), 0x22, dtype=torch.uint8)
    codes[2, 8:16] = 0
    name = "weight_global_scale" if divisors else "weight_scale_2"
    setattr(
        layer,
        "weight_packed" if divisors else "weight",
        torch.nn.Parameter(codes, requires_grad=False),
    )
    setattr(layer, name, torch.nn.Parameter(torch.tensor([1e-4]), requires_grad=False))
    layer.logical_widths = [4]
    assert merge_layer(layer, name, marlin=True, divisors=divisors) is None
    assert not merge.marlin_drops(layer.weight_scale.data.float()).any()


def moe(seed: int, ratios: list[float]) -> tuple[torch.Tensor, ...]:
    experts = len(ratios)
    scales = random_scales(experts * 32, 4, seed, low=0x20).reshape(experts, 32, 4)
    gate = torch.full((experts,), 2e-4)
    return (
        scales,
        torch.stack([gate, gate * torch.tensor(ratios)], -1),
        torch.full((experts,), 3e-4),
        torch.full((experts,), 0.01),
    )


def block_multipliers(scales: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
    """Block scales [E, N, K/16] times factors [E] of each expert, in float64."""
    result = scales.double()
    for factor in factors:
        result = result * factor.double()[:, None, None]
    return result


def test_experts_keep_the_product_of_up_and_w2(merge: ModuleType) -> None:
    ratios = [1.0, 2.9, 0.37, 10.0]
    scales, w13, w2, w2_input = moe(9, ratios)
    merged = merge.merge_gate_up(scales, w13, w2, w2_input, linear_in_up=True)
    up = block_multipliers(
        merged.w13_scales[:, 16:], merged.w13_global_scale, merged.w2_global_scale
    )
    assert (up / block_multipliers(scales[:, 16:], w13[:, 1], w2) - 1).abs().max() < 2**-22
    gate = block_multipliers(merged.w13_scales[:, :16], merged.w13_global_scale)
    assert torch.equal(gate, block_multipliers(scales[:, :16], w13[:, 0]))
    # what w2 sees, divided by the scale it is quantized with, is what it was
    assert torch.allclose(merged.w2_input_scale * torch.tensor(ratios), w2_input, rtol=1e-6)


def test_experts_whose_ratio_folds_leave_w2_alone_whatever_the_activation(
    merge: ModuleType,
) -> None:
    scales, w13, w2, w2_input = moe(10, [2.0, 0.5, 1.0])
    merged = merge.merge_gate_up(scales, w13, w2, w2_input, linear_in_up=False)
    assert torch.equal(merged.w2_global_scale, w2) and torch.equal(merged.w2_input_scale, w2_input)
    for half, rows in ((0, slice(None, 16)), (1, slice(16, None))):
        now = block_multipliers(merged.w13_scales[:, rows], merged.w13_global_scale)
        assert torch.equal(now, block_multipliers(scales[:, rows], w13[:, half]))


def test_an_activation_not_linear_in_up_is_refused_by_expert(merge: ModuleType) -> None:
    scales, w13, w2, _ = moe(11, [1.0, 2.9, 1.0])
    with pytest.raises(merge.ScaleError, match=r"1 of 3 experts \(the first is 1\)"):
        merge.merge_gate_up(scales, w13, w2, None, linear_in_up=False)


def test_experts_are_lifted_for_marlin_each_by_its_own_power_of_two(merge: ModuleType) -> None:
    scales = torch.stack([random_scales(8, 4, 12, low=0x60), random_scales(8, 4, 13, low=0x60)])
    scales[1] = e4m3(2**-9, 2**-8, 0.25, 0.0)
    own = torch.tensor([1e-4, 2e-4])
    lifted, multipliers = merge.lift_experts_for_marlin(scales, own, in_use(scales))
    assert not merge.marlin_drops(lifted.float()).any()
    assert torch.equal(block_multipliers(lifted, multipliers), block_multipliers(scales, own))


def test_an_experts_block_of_zeros_is_held_by_marlin_whatever_its_scale(merge: ModuleType) -> None:
    scales = random_scales(16, 4, seed=14, low=0x60).reshape(2, 8, 4)
    scales[1, 3, 0] = e4m3(2**-9)[0]
    own, codes = torch.tensor([1e-4, 2e-4]), in_use(scales)
    codes[1, 3, :8] = 0
    kept, multipliers = merge.lift_experts_for_marlin(scales, own, codes)
    assert multipliers is own
    assert kept.float()[1, 3, 0] == 0
    assert (kept.view(torch.uint8) != scales.view(torch.uint8)).sum() == 1

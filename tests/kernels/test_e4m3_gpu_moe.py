"""e4m3_moe_decode_linear and e4m3_weight_moe against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels.e4m3_cases import SCALES, e4m3_experts, e4m3_values
from tests.support.kernels.kernel_cases import activations, assert_same_bits

EXPERTS = 6


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, kernels: Any) -> str:
    assert request.param == "cpu" or kernels.implementations()["cuda"] == "compiled"
    return request.param


class Layer:
    """w13 and w2 of some experts, prepared on a device, and their values in float64."""

    def __init__(
        self, device: str, scales: str, hidden: int, inner: int, experts: int = EXPERTS
    ) -> None:
        from nibble_kernels.nvfp4_moe.e4m3 import prepare_e4m3_experts

        self.device, self.experts, self.hidden = device, experts, hidden
        shapes = ((2 * inner, hidden, 2), (hidden, inner, 1))
        self.values, self.prepared = [], []
        for seed, (rows, columns, parts) in enumerate(shapes):
            weight, scale, block = e4m3_experts(experts, rows, columns, scales, parts, seed)
            self.values.append(e4m3_values(weight, scale, parts))
            arguments = (weight.to(device), scale.to(device))
            self.prepared.append(prepare_e4m3_experts(*arguments, block=block, parts=parts))

    def inputs(self, tokens: int, topk: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, weights and ids, some of another process's experts."""
        generator = torch.Generator().manual_seed(tokens)
        drawn = [
            torch.randperm(self.experts + 2, generator=generator)[:topk] for _ in range(tokens)
        ]
        ids = torch.stack(drawn)
        ids = torch.where(ids == self.experts + 1, -1, ids).int()
        router = torch.rand(tokens, topk, generator=generator)
        x = activations(tokens, self.hidden, torch.bfloat16) / 16
        return tuple(part.to(self.device) for part in (x, router, ids))  # type: ignore[return-value]

    def assert_right(self, y: Tensor, x: Tensor, router: Tensor, ids: Tensor) -> None:
        x, router, ids = (part.cpu() for part in (x.double(), router.double(), ids))
        right = torch.zeros_like(x)
        for token, place in (torch.cartesian_prod(*map(torch.arange, ids.shape))).tolist():
            expert = int(ids[token, place])
            if 0 <= expert < self.experts:
                gate, up = (self.values[0][expert] @ x[token]).chunk(2)
                h = torch.nn.functional.silu(gate) * up
                right[token] += router[token, place] * (self.values[1][expert] @ h)
        # Each of several roundings to bfloat16 is 2^-9 at most.
        assert (y.cpu().double() - right).norm() / right.norm() < 0.006


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(("tokens", "topk"), [(1, 6), (16, 4), (40, 4), (129, 2), (200, 5)])
def test_a_layer_adds_up_its_pairs(device: str, scales: str, tokens: int, topk: int) -> None:
    """Decode kernels 64 pairs at a time, and above 128 tokens torch."""
    from nibble_kernels.nvfp4_moe.e4m3 import e4m3_weight_moe

    layer = Layer(device, scales, 144, 144)
    inputs = layer.inputs(tokens, topk)
    layer.assert_right(e4m3_weight_moe(*inputs, *layer.prepared), *inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("scales", SCALES)
def test_60_experts_of_1408_rows_with_any_routing(scales: str) -> None:
    """All tokens to one expert, one each, others' experts; 100 replays have the same bits."""
    from nibble_kernels.nvfp4_moe.e4m3 import e4m3_weight_moe

    layer = Layer("cuda", scales, 512, 1408, experts=60)
    for tokens in (1, 8, 16):
        x, router, ids = layer.inputs(tokens, 4)
        same, each = torch.full_like(ids[:, :1], 7), torch.arange(tokens * 4).int().view(-1, 4) % 60
        for chosen in (ids, same, each.cuda(), torch.where(ids % 2 == 0, -1, ids)):
            weights = router[:, : chosen.shape[1]].contiguous()
            y = e4m3_weight_moe(x, weights, chosen.contiguous(), *layer.prepared)
            layer.assert_right(y, x, weights, chosen)
            for _ in range(100):
                again = e4m3_weight_moe(x, weights, chosen.contiguous(), *layer.prepared)
                assert_same_bits((again,), (y,))


@pytest.mark.parametrize("scales", SCALES)
def test_prepared_experts_keep_their_codes(kernels: object, scales: str) -> None:
    from nibble_kernels.nvfp4_moe.e4m3 import prepare_e4m3_experts, stored_values

    weight, scale, block = e4m3_experts(3, 48, 176, scales)
    prepared = prepare_e4m3_experts(weight, scale, block=block)
    assert_same_bits((stored_values(prepared, 176),), (weight,))


def test_experts_that_the_kernel_does_not_read_are_refused(kernels: object) -> None:
    from nibble_kernels.nvfp4_moe.e4m3 import prepare_e4m3_experts

    weight, scale, block = e4m3_experts(2, 256, 256, "block", parts=2)
    for bad, reason in (
        ((weight[:, :248], scale), "rows and columns in 16s"),
        ((weight[..., :136], scale), "rows and columns in 16s"),
        ((weight.float(), scale), "expected float8_e4m3fn"),
        ((weight, scale[:, :1]), "expected scales"),
    ):
        with pytest.raises(ValueError, match=reason):
            prepare_e4m3_experts(*bad, block=block, parts=2)
    with pytest.raises(ValueError, match="blocks of scales of 64 x 64 are not supported"):
        prepare_e4m3_experts(weight, scale, block=(64, 64), parts=2)
    with pytest.raises(ValueError, match="do not fit"):
        prepare_e4m3_experts(weight, scale)
    weight.view(torch.uint8)[1, 5, 9] = 0xFF
    with pytest.raises(ValueError, match="a weight of expert 1 is NaN"):
        prepare_e4m3_experts(weight, scale, block=block, parts=2)


def test_the_operators_are_registered_soundly(device: str) -> None:
    layer = Layer(device, "channel", 48, 32)
    x, router, ids = layer.inputs(4, 2)
    w13, w2 = layer.prepared
    arguments = (x, *w13[:4], ids, None, w13.rows, True)
    torch.library.opcheck(torch.ops.nibble.e4m3_moe_decode_linear.default, arguments)
    torch.library.opcheck(torch.ops.nibble.e4m3_weight_moe.default, (x, router, ids, *w13, *w2))

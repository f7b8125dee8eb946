"""Quartet II's activations by mode, its weights from both forms of checkpoint, and the heads of
each rank.
"""

from __future__ import annotations

import json
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models.cloverlm_models import VECTORS

MODES = ("token", "batch-pow2", "batch")


@pytest.fixture
def op(implementation: str) -> Any:
    """(x, mode, amax) -> codes, linear scales, G on the CPU."""
    from nibble_kernels.quartet2 import quartet2_quant, reference

    def quantize(x: Tensor, mode: Any, amax: Tensor | None = None) -> list[Tensor]:
        if implementation == "reference":
            return list(reference.quartet2_quant(x, amax, mode, False))
        x, amax = x.to(implementation), amax if amax is None else amax.to(implementation)
        return [y.cpu() for y in quartet2_quant(x, mode, amax, tiled=False)]

    return quantize


def activations(rows: int = 6, columns: int = 128) -> Tensor:
    """Rows of very different size."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 3, rows)[:, None]
    ).bfloat16()


def meaning(codes: Tensor, scales: Tensor, g: Tensor) -> Tensor:
    from nibble_kernels.quartet2 import nvfp4_dequantize

    return nvfp4_dequantize(codes, scales, g, torch.float64)


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Shapes and bits."""
    return all(
        a.shape == b.shape
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(
    ("amax", "g"),
    [
        (1536.0, 1.0),
        (1537.0, 2.0),
        (1535.0, 1.0),
        (768.0, 0.5),
        (769.0, 1.0),
        (3072.0, 2.0),
        (1.0, 2.0**-10),
        (0.0, 1.0),
    ],
)
def test_the_power_of_two_is_the_least_that_holds_the_largest(
    amax: float, g: float, kernels: ModuleType
) -> None:
    from nibble_kernels.quartet2.reference import power_of_two

    found, inverse = power_of_two(torch.tensor(amax))
    assert (float(found), float(inverse)) == (g, 1 / g)


def test_every_power_of_two_is_normal_and_so_is_its_inverse(kernels: ModuleType) -> None:
    from nibble_kernels.quartet2.reference import power_of_two

    amax = torch.cat([torch.logspace(-44, 38, 4001), torch.tensor([torch.inf, torch.nan])])
    g, inverse = power_of_two(amax)
    assert torch.equal(g * inverse, torch.ones_like(g)) and (g >= 2.0**-126).all()
    usual = (amax > 1e-30) & (amax < 1e35)
    ratio = amax[usual] / (1536 * g[usual])
    assert (ratio <= 1).all() and (ratio > 0.5).all()


def test_a_token_is_quantized_alike_whatever_its_neighbours(op: Any) -> None:
    x = activations()
    together = op(x, "token")
    for row in range(len(x)):
        assert same(op(x[row : row + 1], "token"), [part[row : row + 1] for part in together])


def test_a_batchs_power_of_two_changes_nothing_while_blocks_do_not_underflow(op: Any) -> None:
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[1:] *= 100
    assert torch.equal(meaning(*op(x[:1], "batch-pow2")), meaning(*op(x, "batch-pow2"))[:1])
    assert torch.equal(meaning(*op(x[:1], "batch-pow2")), meaning(*op(x[:1], "token")))


def test_the_authors_scale_is_another_draw_for_every_batch(op: Any) -> None:
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[1:] *= 20
    alone, batched = meaning(*op(x[:1], "batch")), meaning(*op(x, "batch"))[:1]
    assert 0.03 < float((alone - batched).norm() / alone.norm()) < 0.15


@pytest.mark.parametrize("mode", MODES)
def test_four_over_six_errs_as_little_in_every_mode(mode: str, op: Any) -> None:
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(2)).bfloat16()
    error = float((meaning(*op(x, mode)) - x.double()).norm() / x.double().norm())
    assert 0.085 < error < 0.0885  # 8.70 % of Gaussian rows; plain NVFP4 has 9.51 %


@pytest.mark.parametrize("mode", ["token", "batch-pow2"])
def test_what_powers_of_two_give_is_exact_in_bf16(mode: str, op: Any) -> None:
    from nibble_kernels.quartet2 import nvfp4_dequantize

    codes, scales, g = op(activations(), mode)
    assert torch.equal(
        nvfp4_dequantize(codes, scales, g, torch.bfloat16).double(), meaning(codes, scales, g)
    )


@pytest.mark.parametrize("mode", MODES)
def test_the_largest_magnitude_may_be_given(mode: str, op: Any) -> None:
    x = activations()
    amax = x.abs().amax(-1, keepdim=True).float() if mode == "token" else x.abs().amax().float()
    assert same(op(x, mode, amax), op(x, mode))
    assert not same(op(x, mode, 4 * amax), op(x, mode))


@pytest.mark.parametrize("mode", MODES)
def test_zeros_and_no_rows_are_fine(mode: str, op: Any) -> None:
    codes, scales, g = op(torch.zeros(2, 32, dtype=torch.bfloat16), mode)
    assert not codes.any() and not scales.float().any() and (g == 1).all()
    codes, scales, g = op(torch.zeros(0, 32, dtype=torch.bfloat16), mode)
    assert (codes.shape, scales.shape) == ((0, 16), (0, 2))


def test_float16_and_bfloat16_are_read_as_they_are(op: Any, implementation: str) -> None:
    """The GPU's kernel has no float32, which the others know."""
    from nibble_kernels.quartet2 import reference

    for dtype in (torch.float16, torch.bfloat16):
        x = (activations() / 4).to(dtype)
        wide = reference.quartet2_quant(x.float(), None, "token", False)
        assert torch.equal(meaning(*op(x, "token")), meaning(*wide))
        if implementation != "cuda":
            assert same(op(x.float(), "token"), list(wide))


def test_every_implementation_gives_the_specifications_bits(compiled: str) -> None:
    from nibble_kernels.quartet2 import quartet2_quant, reference

    for mode in MODES:
        found = [y.cpu() for y in quartet2_quant(activations(130, 144).to(compiled), mode)]
        assert same(found, list(reference.quartet2_quant(activations(130, 144), None, mode, True)))


def test_another_mode_or_shape_is_refused(kernels: ModuleType) -> None:
    from nibble_kernels.quartet2 import quartet2_quant

    with pytest.raises(ValueError, match="token, batch-pow2, batch"):
        quartet2_quant(torch.zeros(1, 16), "row")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="multiple of 16"):
        quartet2_quant(torch.zeros(1, 24), "token")


@pytest.fixture
def stored(kernels: ModuleType) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A weight in both forms: BF16, and packed with tiled scales as the authors' converter
    writes it.
    """
    pytest.importorskip("vllm")
    from nibble_kernels.quartet2.quantize import quant_fp4

    weight = (torch.randn(256, 512, generator=torch.Generator().manual_seed(3)) * 0.05).bfloat16()
    codes, scales, g = quant_fp4(weight, four_over_six=True, tiled=True)
    packed = {
        "weight": codes.view(torch.float4_e2m1fn_x2),
        "weight_scale": scales,
        "weight_scale_2": g,
    }
    return {"weight": weight}, packed


@pytest.mark.vllm
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_both_forms_give_every_rank_the_same_operands_with_one_scale(
    ranks: int, stored: Any
) -> None:
    from nibble.engine.plugin.quartet2 import operands

    bf16, packed = stored
    device = torch.device("cpu")
    whole = operands("m", bf16, slice(None), slice(None), device)
    assert same(list(whole), list(operands("m", packed, slice(None), slice(None), device)))
    for rank in range(ranks):
        rows = slice(rank * 256 // ranks, (rank + 1) * 256 // ranks)
        columns = slice(rank * 512 // ranks, (rank + 1) * 512 // ranks)
        part = [
            whole[0][rows, columns.start // 2 : columns.stop // 2],
            whole[1][rows, columns.start // 16 : columns.stop // 16],
            whole[2],
        ]
        assert same(list(operands("m", bf16, rows, columns, device)), part)
        assert same(list(operands("m", packed, rows, columns, device)), part)


@pytest.mark.vllm
def test_scales_in_rows_are_refused_where_tiles_are_meant(stored: Any) -> None:
    from nibble_kernels.scale_layout import untile

    from nibble.engine.plugin.quartet2 import operands

    packed = dict(stored[1])
    packed["weight_scale"] = untile(packed["weight_scale"], 256, 32)
    with pytest.raises(ValueError, match=r"m: its largest code times scale is \d+, expected 1536"):
        operands("m", packed, slice(None), slice(None), torch.device("cpu"))


@pytest.mark.vllm
def test_values_that_are_not_finite_are_refused(stored: Any) -> None:
    from nibble.engine.plugin.quartet2 import operands

    weight = stored[0]["weight"].clone()
    weight[3, 5] = torch.nan
    with pytest.raises(ValueError, match=r"m\.weight holds values that are not finite"):
        operands("m", {"weight": weight}, slice(None), slice(None), torch.device("cpu"))


@pytest.mark.vllm
@pytest.mark.parametrize("ranks", [1, 2, 4, 7, 28])
def test_every_query_finds_its_key_head_on_its_rank(ranks: int, kernels: ModuleType) -> None:
    from nibble.engine.plugin.cloverlm.projection import heads_of_rank

    seen = []
    for rank in range(ranks):
        heads = heads_of_rank(28, 7, rank, ranks)
        group = len(heads.queries) // len(heads.groups)  # as vLLM's attention divides them
        seen += [heads.stored[heads.groups[index // group]] for index in range(len(heads.queries))]
    assert seen == [query // 4 for query in range(28)]


@pytest.mark.vllm
def test_two_ranks_have_seven_halves_of_groups_each(kernels: ModuleType) -> None:
    from nibble.engine.plugin.cloverlm.projection import heads_of_rank

    found = [heads_of_rank(28, 7, rank, 2) for rank in (0, 1)]
    keys = [[heads.stored[group] for group in heads.groups] for heads in found]
    assert keys == [[0, 0, 1, 1, 2, 2, 3], [3, 4, 4, 5, 5, 6, 6]]
    with pytest.raises(ValueError, match="cannot be shared by 3"):
        heads_of_rank(28, 7, 0, 3)


@pytest.mark.vllm
def test_the_rotation_is_that_of_the_vectors(kernels: ModuleType) -> None:
    from nibble.engine.plugin.cloverlm.arithmetic import Rotary

    vector = json.loads((VECTORS / "cloverlm_rope.json").read_text())
    rotary = Rotary(128, 1024.0, 1024)
    for position, pair, _, cosine, sine in vector["table"]:
        assert rotary.table[position, pair].tolist() == pytest.approx([cosine, sine], abs=1e-6)
    x = torch.sin(0.1 * torch.arange(128, dtype=torch.float64) + 0.3).float()
    found = rotary(torch.tensor([7]), x.reshape(1, 1, 128))
    assert (found.flatten() - torch.tensor(vector["y7"])).abs().max() < 2e-6


@pytest.mark.vllm
@pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="vLLM asks more of a model before it chooses among GPU backends",
)
@pytest.mark.parametrize(
    ("cache", "scale"), [("fp8", 2.0**-8), ("fp8_e5m2", 2.0**-8), ("auto", 1.0)]
)
def test_keys_of_length_one_have_a_scale_of_their_own_in_an_fp8_cache(
    cache: Any, scale: float, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After loading, when vLLM has set its own, in each of the three places where its backends
    look.
    """
    from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config

    from nibble.engine.plugin.cloverlm import model
    from nibble.engine.plugin.cloverlm.config import CloverLMConfig

    parallel = {"get_tensor_model_parallel_world_size": 1, "get_tensor_model_parallel_rank": 0}
    for name, value in parallel.items():
        monkeypatch.setattr(model, name, lambda value=value: value)
    for name in ("HeadProjection", "RowParallelLinear"):
        monkeypatch.setattr(model, name, lambda *args, **kwargs: torch.nn.Identity())
    config: Any = VllmConfig(cache_config=CacheConfig(cache_dtype=cache))
    config.model_config = SimpleNamespace(
        hf_config=CloverLMConfig(), dtype=torch.bfloat16, is_mm_prefix_lm=False, rswa_window=None
    )
    with set_current_vllm_config(config):
        attention = model.CloverAttention(config, "blocks.0.mhsa").attention
        attention.process_weights_after_loading(torch.bfloat16)
    assert [float(attention._k_scale), float(attention._k_scale_cpu), attention._k_scale_float] == [
        scale
    ] * 3


@pytest.mark.vllm
def test_rows_that_fill_up_a_graph_do_not_count(kernels: ModuleType) -> None:
    from vllm.forward_context import ForwardContext, override_forward_context

    from nibble.engine.plugin.quartet2 import _batch_amax

    x = activations()
    x[-2:] = torch.nan
    context = ForwardContext(
        no_compile_layers={},
        attn_metadata={},
        slot_mapping={},
        is_padding=torch.arange(len(x)) >= len(x) - 2,
    )
    with override_forward_context(context):
        assert _batch_amax(x) == x[:-2].abs().amax()
    assert _batch_amax(x).isnan()

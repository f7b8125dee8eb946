"""nvfp4_moe: experts against float64, every activation vLLM names, routing, both quantizations,
edges and refusals.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.kernels.kernel_cases import packed_weight, values_of

GATED = ("silu", "gelu", "gelu_tanh", "swigluoai", "swigluoai_uninterleave", "swiglustep")
NOT_GATED = ("silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul")
SWIGLU: dict[str, dict[str, float]] = {
    "swigluoai_uninterleave": {"swiglu_limit": 1.5, "swiglu_alpha": 1.2, "swiglu_beta": 0.5}
}


@pytest.fixture(params=["reference", "compiled"])
def moe(request: pytest.FixtureRequest, kernels: Any) -> Any:
    """The Python function, computed by the specification and by the compiled code."""
    import nibble_kernels.nvfp4_moe as module

    assert kernels.implementations()["cpu"] == "compiled"
    if request.param == "compiled":
        yield module.nvfp4_moe
        return
    compiled = module._nvfp4_moe
    module._nvfp4_moe = module.reference.nvfp4_moe
    yield module.nvfp4_moe
    module._nvfp4_moe = compiled


def experts(count: int, hidden: int, intermediate: int, gated: bool = True) -> dict[str, Any]:
    """Random experts with unequal global scales, so that intermediates are about 1."""
    shards = 2 if gated else 1
    w13, w13_scale = packed_weight(count * shards * intermediate, hidden)
    w2, w2_scale = packed_weight(count * hidden, intermediate, seed=1)
    generator = torch.Generator().manual_seed(2)

    def around(size: float, *shape: int) -> Tensor:
        return size * torch.exp2(torch.rand(*shape, generator=generator) * 3 - 1.5)

    return {
        "w13": w13.view(count, shards * intermediate, -1),
        "w13_scale": w13_scale.view(count, shards * intermediate, -1),
        "w13_global_scale": around(0.005 / hidden**0.5, count, shards),
        "w2": w2.view(count, hidden, -1),
        "w2_scale": w2_scale.view(count, hidden, -1),
        "w2_global_scale": around(0.005 / intermediate**0.5, count),
    }


def routing(tokens: int, count: int, k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.rand(tokens, count, generator=generator).softmax(-1).topk(k)


def activated(h: Tensor, name: str) -> Tensor:
    """vLLM's activations in float64, as its CUDA code and torch's functions have them."""
    halves = (h[..., 0::2], h[..., 1::2]) if name == "swigluoai" else h.chunk(2, -1)
    gate, up = halves if name in GATED else (h, torch.ones_like(h))
    if name.startswith("swigluoai"):
        limit, alpha, beta = (7.0, 1.702, 1.0) if name == "swigluoai" else SWIGLU[name].values()
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + beta)
    if name == "swiglustep":
        return F.silu(gate).clamp(max=7.0) * up.clamp(-7.0, 7.0)
    if name == "relu2_no_mul":
        return gate.relu() ** 2
    function = name.removesuffix("_no_mul")
    return (
        F.silu(gate)
        if function == "silu"
        else F.gelu(gate, approximate="tanh" if "tanh" in name else "none")
    ) * up


def expected(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    layer: dict[str, Tensor],
    name: str,
    inputs: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The layer in float64; h is rounded to x's type, and x and h to NVFP4 with input scales."""
    from nibble_kernels.nvfp4_linear.reference import round_to_nvfp4

    def given(rows: Tensor, scales: Tensor | None, expert: int) -> Tensor:
        if scales is None:
            return rows.double()
        inverse = 1 / scales[expert]
        return round_to_nvfp4(rows, inverse).double() / inverse.double()

    out = torch.zeros(x.shape, dtype=torch.float64)
    for e in ids[ids >= 0].unique().tolist():
        token, place = (ids == e).nonzero(as_tuple=True)
        scales = layer["w13_global_scale"][e].double()
        half = layer["w13"].shape[1] // len(scales)
        factors = scales.repeat(half) if name == "swigluoai" else scales.repeat_interleave(half)
        w13, w2 = (values_of(layer[w][e], layer[f"{w}_scale"][e]) for w in ("w13", "w2"))
        h = (
            activated(given(x[token], inputs and inputs[0], e) @ w13.T * factors, name)
            .float()
            .to(x.dtype)
        )
        y = given(h, inputs and inputs[1], e) @ w2.T * layer["w2_global_scale"][e].double()
        out.index_add_(0, token, weights[token, place].double()[:, None] * y)
    return out


def assert_close(found: Tensor, exact: Tensor, part: float) -> None:
    """Within `part` of a row's largest element."""
    assert found.shape == exact.shape
    size = exact.abs().amax(-1, keepdim=True)
    assert ((found.double() - exact).abs() / size.clamp(min=1e-30)).max() < part


@pytest.mark.parametrize("name", GATED + NOT_GATED)
def test_every_activation(moe: Any, name: str) -> None:
    layer = experts(4, 64, 48, gated=name in GATED)
    x = torch.randn(20, 64) * 3
    weights, ids = routing(20, 4, 2)
    found = moe(x, weights, ids, **layer, activation=name, **SWIGLU.get(name, {}))
    assert_close(found, expected(x, weights, ids, layer, name), 2e-5)


def test_a_limited_silu_clamps_gate_and_up(moe: Any) -> None:
    layer = experts(2, 64, 32)
    x = torch.randn(5, 64) * 3
    weights, ids = routing(5, 2, 1)
    found = moe(x, weights, ids, **layer, activation="silu", swiglu_limit=1.5)
    same = moe(x, weights, ids, **layer, activation="swigluoai_uninterleave", swiglu_limit=1.5)
    free = moe(x, weights, ids, **layer, activation="silu")
    assert torch.equal(found, same)
    assert not torch.allclose(found, free)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 2, 37, 700])
def test_gate_and_up_keep_their_own_scales(moe: Any, tokens: int, dtype: torch.dtype) -> None:
    """Any number of tokens and of rows an expert, up to several portions of the work."""
    layer = experts(5, 80, 48)
    x = torch.randn(tokens, 80).to(dtype)
    weights, ids = routing(tokens, 5, 3)
    found = moe(x, weights, ids.to(torch.int32), **layer, activation="silu")
    assert found.dtype == dtype
    assert_close(
        found, expected(x, weights, ids, layer, "silu"), 2e-5 if dtype == torch.float32 else 1e-2
    )


def test_activations_are_quantized_with_each_experts_scales(moe: Any) -> None:
    layer = experts(3, 64, 32)
    x = torch.randn(30, 64)
    weights, ids = routing(30, 3, 2)
    inputs = torch.tensor([1.0, 2.0, 0.7]) * 2e-3, torch.tensor([0.5, 1.0, 2.0]) * 1e-2
    found = moe(
        x,
        weights,
        ids,
        **layer,
        activation="silu",
        w13_input_scale=inputs[0],
        w2_input_scale=inputs[1],
    )
    exact = expected(x, weights, ids, layer, "silu", inputs)
    # A sum that lies on a tie of the second quantization may fall to either side.
    error = (found.double() - exact).abs().amax(-1) / exact.abs().amax(-1)
    assert (error < 2e-5).float().mean() > 0.8
    assert error.max() < 0.05
    plain = moe(x, weights, ids, **layer, activation="silu")
    assert ((plain - found).abs().amax(-1) / exact.abs().amax(-1)).mean() > 0.02


def test_weights_may_multiply_the_input_instead(moe: Any) -> None:
    layer = experts(3, 64, 32)
    x = torch.randn(9, 64)
    weights, ids = routing(9, 3, 1)
    found = moe(x, weights, ids, **layer, activation="silu", apply_router_weight_on_input=True)
    exact = expected(x * weights, torch.ones_like(weights), ids, layer, "silu")
    assert_close(found, exact, 2e-5)


def test_experts_of_other_processes_add_nothing(moe: Any) -> None:
    layer = experts(4, 64, 32)
    x = torch.randn(12, 64)
    weights, ids = routing(12, 4, 3)
    ids[ids == 2] = -1
    ids[5] = -1
    found = moe(x, weights, ids, **layer, activation="silu")
    assert_close(found[:5], expected(x, weights, ids, layer, "silu")[:5], 2e-5)
    assert found[5].tolist() == [0.0] * 64


def test_no_tokens(moe: Any) -> None:
    layer = experts(2, 64, 32)
    empty = torch.empty(0, 2)
    assert moe(torch.empty(0, 64), empty, empty.int(), **layer, activation="silu").shape == (0, 64)


def test_experts_without_tokens_are_not_read(kernels: object) -> None:
    """NaN in every expert that the router did not choose."""
    from nibble_kernels.nvfp4_moe import nvfp4_moe

    layer = experts(6, 64, 32)
    x, weights, ids = torch.randn(3, 64), torch.ones(3, 1), torch.tensor([[1], [4], [1]])
    before = nvfp4_moe(x, weights, ids, **layer, activation="silu")
    for name in ("w13_scale", "w2_scale"):
        layer[name].view(torch.uint8)[[0, 2, 3, 5]] = 0x7F
    assert torch.equal(nvfp4_moe(x, weights, ids, **layer, activation="silu"), before)


def test_the_number_of_threads_changes_nothing(kernels: object) -> None:
    from nibble_kernels.nvfp4_moe import nvfp4_moe

    layer, threads = experts(8, 208, 112), torch.get_num_threads()
    try:
        for tokens in (1, 50):
            x, results = torch.randn(tokens, 208), []
            weights, ids = routing(tokens, 8, 3)
            for count in (1, 2, 3, 4, 4, 1):
                torch.set_num_threads(count)
                results.append(nvfp4_moe(x, weights, ids, **layer, activation="silu"))
            assert all(torch.equal(one, results[0]) for one in results)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("tokens", [1, 6, 70])
def test_packed_experts_give_the_same_bits(
    kernels: object, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the memory of the experts that they replace."""
    from nibble_kernels.nvfp4_moe import nvfp4_moe, packed

    layer = experts(5, 208, 48)
    x = torch.randn(tokens, 208).bfloat16()
    weights, ids = routing(tokens, 5, 3)
    inputs: dict[str, Any] = {
        "w13_input_scale": torch.full((5,), 2e-3),
        "w2_input_scale": torch.full((5,), 1e-2),
    }
    forms: tuple[dict[str, Any], ...] = ({}, inputs)
    expected = [nvfp4_moe(x, weights, ids, **layer, activation="silu", **rest) for rest in forms]
    for name in ("w13", "w2"):
        before = layer[name].data_ptr()
        both = packed.pack_experts(layer[name], layer[f"{name}_scale"])
        assert both[0].data_ptr() == before
        layer[name], layer[f"{name}_scale"] = both
    for rest, right in zip(forms, expected, strict=True):
        found = packed.nvfp4_packed_moe(x, weights, ids, **layer, activation="silu", **rest)
        assert torch.equal(found, right)
    monkeypatch.setattr(packed, "_packed_moe", packed._reference)
    plain = packed.nvfp4_packed_moe(x, weights, ids, **layer, activation="silu")
    assert_close(plain, expected[0].double(), 1e-2)
    with pytest.raises(ValueError, match=r"w2 must be packed uint8 codes \[5, 13, 3, 128\]"):
        packed.nvfp4_packed_moe(
            x, weights, ids, **layer | {"w2": layer["w2"][:, 1:]}, activation="silu"
        )


def test_wrong_arguments_are_refused(kernels: object) -> None:
    from nibble_kernels.nvfp4_moe import nvfp4_moe

    layer = experts(3, 64, 32)
    good: dict[str, Any] = {"x": torch.randn(4, 64), "activation": "silu", **layer}
    good["topk_weights"], good["topk_ids"] = routing(4, 3, 2)
    for message, change in (
        ("activation 'situ' are not supported; expected one of silu", {"activation": "situ"}),
        ("needs swiglu_limit", {"activation": "swigluoai_uninterleave"}),
        (r"expected x \[T, H\]", {"x": torch.randn(5, 64)}),
        ("w13 must be codes", {"x": torch.randn(4, 32)}),
        ("w2 must be codes", {"w2": layer["w2"][..., :8]}),
        (
            r"w2 must be \[3, 64, ...\]",
            {"w2": layer["w2"][:, :32], "w2_scale": layer["w2_scale"][:, :32]},
        ),
        (r"w13_global_scale must be float32 \[3, 2\]", {"w13_global_scale": torch.ones(3)}),
        ("both w13 and w2", {"w2_input_scale": torch.ones(3)}),
        (
            "w13_input_scale must be",
            {"w13_input_scale": torch.ones(2), "w2_input_scale": torch.ones(3)},
        ),
    ):
        with pytest.raises(ValueError, match=message):
            nvfp4_moe(**(good | dict[str, Any](change)))
    with pytest.raises(RuntimeError, match="expert 3 of 3"):
        nvfp4_moe(**{**good, "topk_ids": torch.full((4, 2), 3)})


def test_the_operator_compiles(kernels: object) -> None:
    import torch._dynamo.testing
    from nibble_kernels.nvfp4_moe import nvfp4_moe

    layer = experts(3, 64, 32)
    torch._dynamo.reset()
    counter, graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager"), []
    traced = torch.compile(nvfp4_moe, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (7, 5, 19):
        args: Any = (torch.randn(tokens, 64), *routing(tokens, 3, 2), *layer.values(), "silu")
        assert torch.equal(traced(*args), nvfp4_moe(*args))
        graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1

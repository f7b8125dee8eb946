"""nvfp4_w4a4_moe: the operator against nvfp4_moe, whose formula it shares, and what it refuses. On
the CPU it is the specification; GPUs before SM12x emulate its products.
"""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels.w4a4_experts import (
    Layer,
    duplicates,
    nowhere,
    of_a_map,
    one_expert,
    one_token_each,
    random_ids,
)

LAYERS = [  # tokens, experts a token, experts, hidden, intermediate
    ((19, 2, 5, 176, 48), random_ids),
    ((9, 16, 64, 272, 144), random_ids),
    ((40, 4, 60, 272, 1408), random_ids),
    ((5, 10, 512, 256, 128), random_ids),
    ((130, 1, 64, 272, 144), one_expert),
    ((64, 1, 64, 256, 176), one_token_each),
    ((300, 2, 64, 144, 128), duplicates),
    ((700, 6, 64, 144, 80), of_a_map),
    ((3, 4, 16, 144, 48), nowhere),
]
NAMES = [f"{shape}, {choose.__name__}" for shape, choose in LAYERS]


def multiply(layer: Layer, device: str = "cpu", **options: Any) -> Tensor:
    from nibble_kernels.nvfp4_moe.w4a4 import nvfp4_w4a4_moe
    from nibble_kernels.nvfp4_moe.weight import PreparedExperts

    def on_device(one: Any) -> Any:
        codes, scales, factors = (part.to(device) for part in one[:3])
        return PreparedExperts(codes, scales, factors, one.rows, one.native)

    limit, alpha, beta = layer.activation
    prepared = map(on_device, layer.prepared)
    biases = [None if bias is None else bias.to(device) for bias in layer.biases]
    options = {"function": layer.function, "gated": layer.gated} | options
    options |= {"limit": limit, "alpha": alpha, "beta": beta}
    options |= {"w13_bias": biases[0], "w2_bias": biases[1]}
    inputs = [part.to(device) for part in (layer.x, layer.router, layer.ids)]
    scales = [scale.to(device) for scale in layer.input_scales]
    moe: Any = nvfp4_w4a4_moe
    return moe(*inputs, *prepared, *scales, **options).cpu()


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Within codes and roundings of the intermediate that another order of sums changes."""
    found, expected = found.double(), expected.double()
    assert ((found - expected).norm(dim=-1) <= 0.02 * expected.norm(dim=-1) + 1e-30).all()


@pytest.mark.parametrize(("shape", "choose"), LAYERS, ids=NAMES)
def test_it_is_nvfp4_moe_with_input_scales(kernels: ModuleType, shape: Any, choose: Any) -> None:
    from nibble_kernels.nvfp4_moe.reference import nvfp4_moe

    layer = Layer(*shape, choose=choose)
    (w13, w13_scale), (w2, w2_scale) = layer.weights
    ids = layer.ids.where(layer.ids < layer.experts, -1).long()
    reference: Any = nvfp4_moe
    expected = reference(
        *(layer.x, layer.router, ids, w13, w13_scale, layer.factors[0], w2, w2_scale),
        *(layer.factors[1][:, 0], *layer.input_scales, False, "silu", True, False),
        *layer.activation,
    )
    assert_close(multiply(layer), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "choose"), LAYERS, ids=NAMES)
@pytest.mark.parametrize(("function", "gated"), [("silu", True), ("relu2", False)])
def test_a_gpu_computes_what_is_specified(
    kernels: ModuleType, shape: Any, choose: Any, function: str, gated: bool
) -> None:
    layer = Layer(*shape, choose=choose, function=function, gated=gated, is_biased=not gated)
    expected, found = multiply(layer), multiply(layer, "cuda")
    assert_close(found, expected)
    for _ in range(10):
        assert torch.equal(multiply(layer, "cuda"), found)
    for form in (16, 32, 64, 128):
        assert_close(multiply(layer, "cuda", form=form), expected)


def test_it_has_a_shape_without_a_device(kernels: ModuleType) -> None:
    from nibble_kernels.nvfp4_moe.w4a4 import nvfp4_w4a4_moe
    from torch._subclasses.fake_tensor import FakeTensorMode

    layer = Layer(3, 2, 4, 48, 16)
    moe: Any = nvfp4_w4a4_moe
    with FakeTensorMode() as mode:
        fake = mode.from_tensor
        prepared = [
            one._replace(**{name: fake(getattr(one, name)) for name in one._fields[:3]})
            for one in layer.prepared
        ]
        inputs = map(fake, (layer.x, layer.router, layer.ids))
        out = moe(*inputs, *prepared, *map(fake, layer.input_scales))
    assert (out.shape, out.dtype) == ((3, 48), torch.bfloat16)


def test_what_it_does_not_take_is_named(kernels: ModuleType) -> None:
    from nibble_kernels.nvfp4_moe.w4a4 import nvfp4_w4a4_moe

    layer = Layer(3, 2, 4, 48, 16)
    w13, w2 = layer.prepared
    moe: Any = nvfp4_w4a4_moe
    inputs = (layer.x, layer.router, layer.ids)
    with pytest.raises(ValueError, match="prepared with native=True"):
        moe(*inputs, w13, w2._replace(native=False), *layer.input_scales)
    with pytest.raises(ValueError, match=re.escape("w2_input_scale must be float32 [4]; got")):
        moe(*inputs, w13, w2, layer.input_scales[0], torch.ones(()))
    with pytest.raises(ValueError, match=re.escape("got [3, 48], [2, 2] and [3, 2]")):
        moe(layer.x, layer.router[:2], layer.ids, w13, w2, *layer.input_scales)

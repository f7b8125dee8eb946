"""models/fake_nvfp4.py, with which the demos are trained: a layer computes with NVFP4, and the
gradient is that of the input as it was.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch
from torch import nn

from tests.support.paths import ROOT

FILE = ROOT / "models" / "fake_nvfp4.py"


@pytest.fixture(scope="module")
def fake() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fake_nvfp4", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_input_of_a_layer_is_rounded_once_and_has_the_gradient_of_the_unrounded_one(
    fake: ModuleType, dtype: torch.dtype
) -> None:
    class Keeps(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.seen = input
            return super().forward(input)

    layer = Keeps(256, 8, bias=False).to(dtype)
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    with fake.nvfp4_activations(nn.Sequential(layer)):
        layer_input = nn.Sequential(layer)(x)
    layer_input.sum().backward()
    assert torch.equal(layer.seen, fake.fake_nvfp4(x).to(dtype))
    assert x.grad is not None
    assert torch.equal(x.grad, layer.weight.sum(0).expand_as(x))

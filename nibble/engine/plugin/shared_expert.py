"""A shared expert in the launch of the routed ones, as one more expert of each token.

vLLM computes it beside them, in separate launches that read few bytes. Its linear layers keep
their weights: these have the layout of nibble's experts, whose kernel reads them there.
"""

from __future__ import annotations

from typing import Any

import torch
from nibble_kernels.nvfp4_moe import activation_of
from nibble_kernels.nvfp4_moe.grouped import SharedExpert
from nibble_kernels.nvfp4_moe.weight import PreparedExperts
from torch import Tensor
from vllm.platforms import current_platform

from nibble.engine.plugin.cuda import JOINED, WEIGHT_ONLY, NibbleNvFp4LinearKernel
from nibble.engine.plugin.fuse_silu import GateUpSiluMul
from nibble.engine.plugin.layers import COLUMN_SCALE, kernel_of
from nibble.engine.plugin.loaded_models import expect

TARGET = (9, 0)  # nvfp4_moe_linear's


class _Weight:
    """A linear layer's weight as that of one expert."""

    def __init__(self, layer: Any) -> None:
        self._layer, self._global_scales = layer, _global_scales(layer)

    def follow(self) -> None:
        """Take the global scales again, in place, since CUDA graphs read them."""
        self._global_scales.copy_(_global_scales(self._layer))

    def prepared(self) -> PreparedExperts:
        layer = self._layer
        codes, scales, rows = layer.weight.data, layer.weight_scale.data, kernel_of(layer).rows
        return PreparedExperts(codes[None], scales[None], self._global_scales, rows, native=False)


class JoinedExpert:
    """A shared expert that routed experts compute."""

    def __init__(self, gate_up: GateUpSiluMul, down: Any) -> None:
        self._layers = (gate_up, down)
        self._w13, self._w2 = _Weight(gate_up.layer), _Weight(down)

    def follow(self) -> None:
        """After the layer's weights were loaded again."""
        self._w13.follow()
        self._w2.follow()

    def of(self, weights: Tensor) -> SharedExpert:
        """weights: what each token's output is multiplied with, bfloat16 [T, 1]."""
        return SharedExpert(weights, self._w13.prepared(), self._w2.prepared())

    def alone(self, x: Tensor) -> Tensor:
        """Its output by the kernels of its linear layers, to compare with."""
        gate_up, down = self._layers
        return down(gate_up(x)[0])[0]


def is_here() -> bool:
    """Whether the kernel runs on this GPU."""
    return current_platform.get_device_capability() == TARGET


def join(expert: Any, runner: Any) -> None:
    """Let a runner's routed experts compute its shared one, a Qwen2MoeMLP without a gate. Raises
    Unsuitable, and changes nothing, if their kernel does not.
    """
    routed, down = runner.routed_experts, expert.down_proj
    method = routed.quant_method
    expect(is_here(), "the kernel that takes it is for SM90")
    expect(type(method) in WEIGHT_ONLY, f"{type(method).__name__} does not take it")
    is_plain = method.activation == activation_of("silu", None, None, None)
    expect(is_plain and not method.moe.has_bias, "routed experts have another formula")
    expect(type(expert.gate_up_proj) is GateUpSiluMul, "other kernels compute it")
    gate_up = expert.gate_up_proj
    for layer, name in ((gate_up.layer, "w13"), (down, "w2")):
        kernel = kernel_of(layer)
        expect(type(kernel) is NibbleNvFp4LinearKernel, "other kernels compute it")
        expect(not kernel.is_sparse and not kernel.native, "its weights have another layout")
        expect(layer.bias is None, "it has biases")
        size = getattr(routed, f"{name}_weight").shape[1:]
        expect(layer.weight.shape == size, "it is larger or smaller than a routed expert")
    setattr(routed, JOINED, JoinedExpert(gate_up, down))
    runner._shared_experts = None
    runner._forward_entry = runner._select_forward()


def joined(runner: Any) -> JoinedExpert | None:
    """The shared expert that a runner's routed experts compute, if they do."""
    return getattr(runner.routed_experts, JOINED, None)


def _global_scales(layer: Any) -> Tensor:
    """Of both halves of a linear layer's rows, float32 [1, 2]. Raises Unsuitable."""
    scale, factors = kernel_of(layer).global_scale, getattr(layer, COLUMN_SCALE, None)
    if factors is None:
        return torch.full((1, 2), scale, dtype=torch.float32, device=layer.weight.device)
    halves = factors.detach().float().reshape(2, -1)
    expect(bool((halves == halves[:, :1]).all()), "a half of its rows has several global scales")
    return (halves[:, :1].T * scale).contiguous()

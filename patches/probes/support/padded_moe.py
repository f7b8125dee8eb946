"""NVFP4 experts of a tree's CUTLASS backends: their weights in kernel format, and what they
compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from probes.support.nvfp4 import Packed, dequantize, normal_weights, quantize
from probes.support.syntax import Sources

if TYPE_CHECKING:
    import torch

PREPARE = "vllm.model_executor.layers.quantization.utils.flashinfer_fp4_moe.prepare_nvfp4_moe_layer_for_fi_or_cutlass"  # noqa: E501
BACKENDS = "vllm.model_executor.layers.fused_moe.oracle.nvfp4.NvFp4MoeBackend"
ACTIVATIONS = "vllm.model_executor.layers.fused_moe.activation.MoEActivation"
# Kernels that take up before gate (vllm 0.32 flashinfer_fp4_moe.py:372).
UP_FIRST = ("FLASHINFER_CUTLASS", "FLASHINFER_B12X")
EXPERTS, HIDDEN, TOKENS = 2, 128, 4


@dataclass(frozen=True)
class Experts:
    """w13 [E, 2I, H/2] (gate over up) and w2 [E, H, I/2] as a checkpoint has them."""

    intermediate: int
    w13: list[Packed]
    w2: list[Packed]

    @classmethod
    def of(cls, intermediate: int) -> Experts:
        """Normal weights; the same for the same size."""
        up = normal_weights(*[(2 * intermediate, 0.05)] * EXPERTS, columns=HIDDEN)
        down = normal_weights(*[(HIDDEN, 0.05)] * EXPERTS, columns=intermediate)
        return cls(intermediate, [quantize(w) for w in up], [quantize(w) for w in down])


@dataclass(frozen=True)
class Prepared:
    """The same in kernel format, and the intermediate size that the layer's configuration says."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    intermediate: int
    up_first: bool


def prepare(sources: Sources, backend: str, experts: Experts, activation: str = "SILU") -> Prepared:
    """What process_weights_after_loading makes of them. Raises NotImplementedError where the
    tree cannot pad.
    """
    import torch

    parallel = SimpleNamespace(enable_eplb=False)
    config = SimpleNamespace(
        moe_parallel_config=parallel, intermediate_size_per_partition=experts.intermediate
    )
    activations = sources.load(ACTIVATIONS) if sources.has(ACTIVATIONS) else None  # 0.15.1 has none
    layer = SimpleNamespace(activation=activations and activations[activation], moe_config=config)
    weights = {
        "w13": torch.stack([w.codes for w in experts.w13]),
        "w13_scale": torch.stack([w.scales for w in experts.w13]),
        "w13_scale_2": torch.tensor([w.scale_2 for w in experts.w13]),
        "a13_scale": torch.ones(EXPERTS, 2),
        "w2": torch.stack([w.codes for w in experts.w2]),
        "w2_scale": torch.stack([w.scales for w in experts.w2]),
        "w2_scale_2": torch.tensor([w.scale_2 for w in experts.w2]),
        "a2_scale": torch.ones(EXPERTS),
    }
    run, chosen = sources.load(PREPARE), sources.load(BACKENDS)[backend]
    # swizzle_blockscale calls .cuda() on any machine (N28).
    with patch.object(torch.Tensor, "cuda", lambda tensor: tensor):
        made = run(backend=chosen, layer=layer, is_act_and_mul=True, **weights)
    w13, w13_scale, _, _, w2, w2_scale, _, _ = made
    size = config.intermediate_size_per_partition
    return Prepared(w13, w13_scale, w2, w2_scale, size, backend in UP_FIRST)


def expected_output(experts: Experts) -> torch.Tensor:
    """What the checkpoint means, float64 [experts, tokens, hidden]."""
    import torch

    outputs = []
    for w13, w2 in zip(experts.w13, experts.w2, strict=True):
        gate, up = w13.values.double().chunk(2)
        outputs.append(_mlp(gate, up, w2.values))
    return torch.stack(outputs)


def output(prepared: Prepared, experts: Experts) -> torch.Tensor:
    """What a kernel computes that reads the codes, and the block scales in the 128x4 layout, as
    they are now.
    """
    import torch

    outputs = []
    for i in range(EXPERTS):
        w13 = _unswizzled(prepared.w13[i], prepared.w13_scale[i], experts.w13[i].scale_2)
        w2 = _unswizzled(prepared.w2[i], prepared.w2_scale[i], experts.w2[i].scale_2)
        first, second = w13.double().chunk(2)
        gate, up = (second, first) if prepared.up_first else (first, second)
        outputs.append(_mlp(gate, up, w2))
    return torch.stack(outputs)


def _mlp(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    import torch

    tokens = (
        torch.linspace(-2, 2, TOKENS * HIDDEN, dtype=torch.float64).reshape(TOKENS, HIDDEN).sin()
    )
    hidden = torch.nn.functional.silu(tokens @ gate.double().T) * (tokens @ up.double().T)
    return hidden @ down.double().T


def _unswizzled(codes: torch.Tensor, scales: torch.Tensor, scale_2: float) -> Any:
    """Dequantized; the scale of row r and block b lies at CUTLASS's 128x4 offset."""
    import torch

    rows, blocks = codes.shape[0], codes.shape[1] // 8
    r, b = torch.meshgrid(torch.arange(rows), torch.arange(blocks), indexing="ij")
    offset = (
        (r // 128 * (scales.shape[1] // 4) + b // 4) * 512 + r % 32 * 16 + r // 32 % 4 * 4 + b % 4
    )
    linear = scales.view(torch.uint8).flatten()[offset].view(torch.float8_e4m3fn)
    return dequantize(codes, linear, scale_2)

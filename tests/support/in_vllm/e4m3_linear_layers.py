"""Run as a program: FP8 linear layers as vLLM builds them from a quantization config, with nibble's
kernel for few rows, whose operator computes its specification on the CPU. Cases are JSON on stdin,
findings on stdout: the kernel as reported, and the errors against float64 of few rows and of many,
or what refuses the case.

vLLM's kernel for blocks on the CPU rearranges the weight: vLLM's for Hopper takes its place, which
multiplies nothing there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.in_vllm.e4m3_layers import quantization
from tests.support.in_vllm.expert_layers import answer, enter_vllm

ROWS, COLUMNS, FEW, MANY = (256, 128), 384, 16, 33
PREFIX = "model.layers.0.mlp.gate_up_proj"


def main() -> None:
    enter_vllm()
    torch.set_default_dtype(torch.bfloat16)
    from vllm import _custom_ops
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm import pytorch
    from vllm.platforms import PlatformEnum

    from nibble.engine.plugin import e4m3_linear

    of_blocks: Any = pytorch.BlockWiseTorchFP8ScaledMMLinearKernel
    of_blocks.is_supported = classmethod(lambda cls, capability=None: (True, None))
    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].insert(0, of_blocks)
    custom: Any = _custom_ops
    custom.scaled_fp8_quant = _quantized  # the CPU has no such operator
    e4m3_linear.follow_kernels()
    answer(_finding)


def _quantized(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _finding(case: dict[str, Any]) -> Any:
    from vllm.config import KernelConfig, ModelConfig, VllmConfig, set_current_vllm_config

    kernel = case.pop("kernel", "nibble")
    config = VllmConfig(
        kernel_config=KernelConfig(linear_backend=case.pop("backend", "auto")),
        additional_config={"nibble": {"e4m3_linear": kernel}},
    )
    config.model_config = object.__new__(ModelConfig)
    config.model_config.dtype = getattr(torch, case.pop("dtype", "bfloat16"))
    try:
        with set_current_vllm_config(config), torch.inference_mode():
            return _Case(**case).found()
    except (ValueError, NotImplementedError) as error:
        return str(error)


class _Case:
    def __init__(
        self,
        form: str,
        rows: tuple[int, int] = ROWS,
        columns: int = COLUMNS,
        damage: bool = False,
    ) -> None:
        from vllm.model_executor.layers.linear import MergedColumnParallelLinear

        self.generator, self.damage = torch.Generator().manual_seed(0), damage
        self.layer: Any = MergedColumnParallelLinear(
            columns,
            list(rows),
            bias=True,
            quant_config=quantization(form, PREFIX),
            prefix=PREFIX,
            params_dtype=torch.bfloat16,
        )

    def random(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float32)

    def found(self) -> dict[str, Any]:
        from nibble.engine.plugin.report.kernels_used import _linear

        values = self._fill()
        layer, method = self.layer, self.layer.quant_method
        bias = self.random(len(values)).bfloat16()
        method.process_weights_after_loading(layer)
        found: dict[str, Any] = {"kernel": _linear(layer)}
        is_of_blocks = "BlockWise" in found["kernel"]
        for name, rows in (("few", FEW), ("one", 1), ("many", MANY)):
            if name == "many" and is_of_blocks:
                continue
            x = (self.random(rows, values.shape[1]) - 0.5).bfloat16()
            right = x.double() @ values.T + bias.double()
            y = method.apply(layer, x, bias).double()
            found[name] = float((y - right).norm() / right.norm())
        return found

    def _fill(self) -> Tensor:
        """Random weights in the layer, their values in float64."""
        layer = self.layer
        weight = layer.weight.data
        weight.copy_((self.random(*weight.shape) - 0.5).to(torch.float8_e4m3fn))
        is_inverse = hasattr(layer, "weight_scale_inv")
        scale = (layer.weight_scale_inv if is_inverse else layer.weight_scale).data
        scale.copy_(self.random(*scale.shape) + 0.5)
        if scale.numel() == len(ROWS):
            scale.fill_(0.7)  # vLLM rounds weights with unequal ones again
        if getattr(layer, "input_scale", None) is not None:
            layer.input_scale.data.fill_(0.5 / 448)
        if self.damage:
            weight.view(torch.uint8)[2, 3] = 0x7F
        factors = scale.double()
        if scale.numel() == len(ROWS):
            each = torch.tensor(layer.logical_widths)
            factors = factors.repeat_interleave(each)[:, None]
        elif scale.numel() == len(weight):
            factors = factors.reshape(-1, 1)
        else:
            factors = factors.reshape(-(-weight.shape[0] // 128), -1)
            factors = factors.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return weight.double() * factors[: weight.shape[0], : weight.shape[1]]


if __name__ == "__main__":
    main()

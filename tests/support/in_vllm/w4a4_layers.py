"""Run as a program: fused linear layers of W4A4 checkpoints as vLLM builds and loads them, with
nibble's kernel for FP4 activations. With the word `cuda` on a GPU, whatever its products are; else
on the CPU, where the operator computes its specification. Cases are JSON on stdin, findings on
stdout: the kernel's class and its error against vLLM's formula in float64, or what refuses the
case.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.support.in_vllm.expert_layers import answer
from tests.support.models.generated_nvfp4 import quantization

COLUMNS, WIDTHS = 96, (40, 24)
DEVICE = "cuda" if "cuda" in sys.argv[1:] else "cpu"
PARTS = {"modelopt": ("weight", "weight_scale_2", "input_scale")}
PARTS["compressed-tensors"] = ("weight_packed", "weight_global_scale", "input_global_scale")


def main() -> None:
    os.environ["VLLM_PLUGINS"] = ""
    from nibble.trials.worker.vllm_layers import enter_world

    enter_world(DEVICE)
    from nibble.engine.plugin import cuda, w4a4
    from nibble.engine.plugin.install import _install_linear

    _install_linear()
    if DEVICE == "cpu":
        cuda.runs_here = lambda: (True, None)
    w4a4.current_platform = SimpleNamespace(
        is_cuda=lambda: True, get_device_capability=lambda: (_Case.capability, 0)
    )
    cuda.current_platform = SimpleNamespace(
        is_cuda=lambda: True,
        has_device_capability=lambda number: number <= 10 * _Case.capability,
    )
    answer(_finding)


def _finding(case: dict[str, Any]) -> Any:
    from nibble_kernels.merge import ScaleError
    from vllm.config import KernelConfig, VllmConfig, set_current_vllm_config

    flags: dict[str, Any] = {"linear_backend": case.pop("backend", "auto")}
    ours = {"linear_kernel": "nibble"} | case.pop("options", {})
    os.environ["VLLM_BATCH_INVARIANT"] = case.pop("invariant", "0")
    config = VllmConfig(kernel_config=KernelConfig(**flags), additional_config={"nibble": ours})
    try:
        with set_current_vllm_config(config), torch.inference_mode():
            return _Case(**case).finding()
    except (ValueError, ScaleError) as error:
        return str(error)


class _Case:
    number, capability = 0, 12

    def __init__(
        self,
        form: str,
        rows: int = 1,
        *,
        columns: int = COLUMNS,
        widths: tuple[int, ...] = WIDTHS,
        weight_scales: tuple[float, ...] = (0.01, 0.02),
        input_scales: tuple[float | None, ...] = (0.002, 0.003),
        bias: bool = False,
        dtype: str = "bfloat16",
        capability: int = 12,
        compiled: bool = False,
        graphed: bool = False,
        residual: bool = False,
        silu_mul: bool = False,
        bad: str = "",
    ) -> None:
        from vllm.model_executor.layers.linear import MergedColumnParallelLinear
        from vllm.model_executor.layers.quantization.compressed_tensors import (
            compressed_tensors as vllm_compressed,
        )
        from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

        _Case.number += 1
        _Case.capability = capability
        self.form, self.rows, self.widths, self.columns = form, rows, tuple(widths), columns
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.compiled, self.graphed, self.bad = compiled, graphed, bad
        self.adds, self.silu_mul = residual, silu_mul
        self.weight_scales, self.input_scales = weight_scales, input_scales
        generator = torch.Generator().manual_seed(self.number)
        self.random = lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float32)
        form_config: Any = quantization(form, True, ())  # type: ignore[arg-type]
        kind: Any = (
            ModelOptNvFp4Config if form == "modelopt" else vllm_compressed.CompressedTensorsConfig
        )
        torch.set_default_dtype(self.dtype)
        with torch.device(DEVICE):
            self.layer: Any = MergedColumnParallelLinear(
                columns,
                list(self.widths),
                bias=bias,
                quant_config=kind.from_config(form_config),
                prefix=f"model.layers.{self.number}.mlp.gate_up_proj",
                params_dtype=self.dtype,
            )
        torch.set_default_dtype(torch.float32)

    def finding(self) -> tuple[str, float]:
        """The kernel's class, and its error."""
        from nibble.engine.plugin.layers import kernel_of

        weight, bias = self._fill()
        self.layer.quant_method.process_weights_after_loading(self.layer)
        kernel: Any = kernel_of(self.layer)
        x = ((self.random(self.rows, self.columns) - 0.5) * 8).to(self.dtype)
        width = sum(self.widths)
        residual = None
        if self.adds:
            residual = self.random(self.rows, width // (2 if self.silu_mul else 1)).to(self.dtype)
            residual = residual.to(DEVICE)

        def product(x: Tensor) -> Tensor:
            if self.adds or self.silu_mul:
                options = {"residual": residual, "silu_mul": self.silu_mul}
                return kernel.apply_weights(self.layer, x, self.layer.bias, **options)
            return self.layer(x)[0]

        if self.compiled:
            product = torch.compile(product, backend="aot_eager", dynamic=True, fullgraph=True)
        there = x.to(DEVICE)
        y = (in_a_graph(product, there) if self.graphed else product(there)).cpu().double()
        right = self._stored(x) @ weight.T + bias
        if self.silu_mul:
            gate, up = right.chunk(2, dim=-1)
            right = torch.nn.functional.silu(gate) * up
        if residual is not None:
            right = right + residual.cpu().double()
        return type(kernel).__name__, float(((y - right).norm(dim=-1) / right.norm(dim=-1)).max())

    def _stored(self, x: Tensor) -> Tensor:
        """x in FP4 with the scale that vLLM's kernels take: the largest, or 1 / the largest
        divisor.
        """
        from nibble.trials.worker.kernels import stored_activations

        scales = [float(scale or 0) for scale in self.input_scales]
        scale = max(scales) if self.form == "modelopt" else min(scales)
        stored = stored_activations(x, "fp4", scale)
        assert stored is not None
        return stored

    def _fill(self) -> tuple[Tensor, Tensor]:
        """Random shards, as the loader brings them; their values and the bias in float64."""
        from nibble.trials.worker.truth import values

        found = []
        codes_name, factor_name, input_name = PARTS[self.form]
        inverse = self.form != "modelopt"
        for shard, rows in enumerate(self.widths):
            codes = (self.random(rows, self.columns // 2) * 256).to(torch.uint8)
            scales = (self.random(rows, self.columns // 16) + 0.5).to(torch.float8_e4m3fn)
            if self.bad == "block scale":
                scales.view(torch.uint8)[0, 0] = 0x7F
            factor, of_input = self.weight_scales[shard], self.input_scales[shard]
            loaded = {codes_name: codes, "weight_scale": scales}
            loaded[factor_name] = torch.tensor([1 / factor if inverse else factor])
            if of_input is not None:
                divisor = 1 / of_input if of_input else float("inf")
                loaded[input_name] = torch.tensor([divisor if inverse else of_input])
            for name, value in loaded.items():
                parameter = getattr(self.layer, name)
                parameter.weight_loader(parameter, value.squeeze() if inverse else value, shard)
            found.append(values(codes, scales) * factor)
        bias = torch.zeros(sum(self.widths), dtype=torch.float64)
        if self.layer.bias is not None:
            self.layer.bias.data.copy_(self.random(len(bias)))
            bias = self.layer.bias.data.cpu().double()
        return torch.cat(found), bias


def in_a_graph(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The result of the second replay of a CUDA graph, whose input the first did not have."""
    given = torch.zeros_like(x)
    product(given)  # what is found out at the first call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = product(given)
    graph.replay()
    given.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    return y


if __name__ == "__main__":
    main()

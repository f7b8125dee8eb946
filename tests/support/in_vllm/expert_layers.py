"""Run as a program: layers of experts as vLLM builds them, with nibble's methods for GPUs, whose
operators compute their specification on the CPU. Cases are JSON on stdin, findings on stdout: the
error against vLLM's own activation between products in float64, or what refuses the case.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

HIDDEN, INNER, EXPERTS, TOPK, TOKENS = 64, 48, 6, 2, 5
INPUT_SCALES = {"w13": 2e-4, "w2": 1e-4}  # and up to twice that, for inputs of 0.5 and 0.3


def main() -> None:
    enter_vllm()
    answer(_finding)


def enter_vllm() -> None:
    os.environ["VLLM_PLUGINS"] = ""
    from nibble.trials.worker.vllm_layers import enter_world

    enter_world("cpu")
    torch.set_default_dtype(torch.float32)
    _as_on_an_h200()


def answer(finding: Callable[[dict[str, Any]], float | str]) -> None:
    """Print the finding of each case, and end this process at once."""
    for case in json.load(sys.stdin):
        print("FOUND", json.dumps(finding(case)), flush=True)
    os._exit(0)


def _as_on_an_h200() -> None:
    from vllm.model_executor.layers.fused_moe import config as fused_moe

    from nibble.engine.plugin import cuda, w4a4

    config: Any = fused_moe

    class Platform:
        def __getattr__(self, name: str) -> Any:
            return getattr(cuda_platform, name)

        def is_cuda_alike(self) -> bool:
            return True

    cuda_platform = config.current_platform
    config.current_platform = Platform()
    cuda.runs_here = lambda: (True, None)
    cuda.current_platform = SimpleNamespace(
        has_device_capability=lambda number: number <= 90, get_device_capability=lambda: (9, 0)
    )
    w4a4.multiplies_fp4 = lambda: _Case.in_fp4


def _finding(case: dict[str, Any]) -> float | str:
    from vllm.config import KernelConfig, VllmConfig, set_current_vllm_config

    flags: dict[str, Any] = {"moe_backend": case.pop("backend", "auto")}
    ours = {"moe_kernel": "nibble"} if case.get("form", "").endswith("fp4") else {}
    options = ours | case.pop("options", {})
    os.environ["VLLM_BATCH_INVARIANT"] = case.pop("invariant", "0")
    config = VllmConfig(kernel_config=KernelConfig(**flags), additional_config={"nibble": options})
    try:
        with set_current_vllm_config(config), torch.inference_mode():
            return _Case(**case).error()
    except (ValueError, NotImplementedError) as error:
        return str(error)


class _Case:
    number, in_fp4 = 0, False

    def __init__(
        self,
        form: str,
        activation: str,
        biased: bool = False,
        eplb: bool = False,
        own: bool = True,
        part: bool = False,
        experts: int = EXPERTS,
        bad: str = "",
        **layer: Any,
    ) -> None:
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

        _Case.number += 1
        self.fp4 = _Case.in_fp4 = form.endswith("fp4")
        self.bad = bad
        self.gated = MoEActivation.from_str(activation).is_gated
        self.activation, self.biased, self.form = activation, biased, form
        self.limits = {name: layer.get(f"swiglu_{name}") for name in ("limit", "alpha", "beta")}
        generator = torch.Generator().manual_seed(self.number)
        self.random = lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float32)
        with _moving(eplb):
            runner = FusedMoEFactory(
                experts,
                TOPK,
                HIDDEN,
                INNER,
                params_dtype=torch.bfloat16,
                quant_config=_config(form, own),
                prefix=f"experts.{self.number}",
                activation=activation,
                has_bias=biased,
                enable_eplb=eplb,
                ckpt_names=("gate_proj", "down_proj", "up_proj" if self.gated else None),
                **layer,
            )
        self.layer = runner.routed_experts
        if part:  # as the rank of an expert parallel group that has the upper half
            mapped = torch.tensor([-1, -1, -1, 0, 1, 2], dtype=torch.int32)
            self.layer._expert_map = mapped
        self.offset, self.here = (EXPERTS // 2, EXPERTS // 2) if part else (0, EXPERTS)
        self.input_scales: dict[str, Tensor] = {}

    def error(self) -> float:
        weights = {name: self._fill(name) for name in ("w13", "w2")}
        self.layer.quant_method.process_weights_after_loading(self.layer)
        x = (self.random(TOKENS, HIDDEN) - 0.5).bfloat16()
        ids = torch.argsort(self.random(TOKENS, EXPERTS), dim=-1)[:, :TOPK].int()
        router = self.random(TOKENS, TOPK)
        method: Any = self.layer.quant_method
        y: Tensor = method.apply(self.layer, x, router, ids, None, None).double()
        right = torch.zeros_like(y)
        for token in range(TOKENS):
            for place, expert in enumerate(ids[token].tolist()):
                own = expert - self.offset
                if 0 <= own < self.here:
                    h = self._product(weights["w13"], own, self._stored("w13", own, x[token]))
                    h = self._stored("w2", own, self._activated(h).bfloat16())
                    product = self._product(weights["w2"], own, h)
                    right[token] += router[token, place].double() * product
        return float((y - right).norm() / right.norm())

    def _stored(self, name: str, expert: int, x: Tensor) -> Tensor:
        """The activations of a product, in float64: in FP4 with the expert's input scale, the
        larger of gate's and up's.
        """
        from nibble.trials.worker.kernels import stored_activations

        if not self.fp4:
            return x.double()
        stored = stored_activations(x, "fp4", float(self.input_scales[name][expert].max()))
        assert stored is not None
        return stored

    def _fill(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Random weights in the layer; their values in float64 and biases."""
        from nibble.trials.worker.truth import values

        layer, divisors = self.layer, self.form.startswith("compressed")
        codes = getattr(layer, f"{name}_weight_packed" if divisors else f"{name}_weight").data
        codes.copy_((self.random(*codes.shape) * 256).to(torch.uint8))
        scales = getattr(layer, f"{name}_weight_scale").data
        scales.copy_((self.random(*scales.shape) + 0.5).to(torch.float8_e4m3fn))
        key = "weight_global_scale" if divisors else "weight_scale_2"
        factors = getattr(layer, f"{name}_{key}").data
        multipliers = self.random(*factors.shape) * 0.01 + 0.01
        factors.copy_(1 / multipliers if divisors else multipliers)
        for key in ("input_scale", "input_global_scale"):
            if hasattr(layer, f"{name}_{key}"):
                inputs = getattr(layer, f"{name}_{key}").data
                inputs.copy_((self.random(*inputs.shape) + 1) * INPUT_SCALES[name])
                if self.bad == key:
                    inputs.view(-1)[-1] = 0
                self.input_scales[name] = inputs.clone()
                if divisors:
                    inputs.copy_(1 / inputs)
        found = values(codes, scales)
        each = (1 / factors if divisors else factors).double().reshape(len(codes), -1)
        if each.shape[1] == 2 and self.activation == "swigluoai":  # gate and up in turns
            each = each.repeat(1, found.shape[1] // 2)
        else:
            each = each.repeat_interleave(found.shape[1] // each.shape[1], dim=1)
        bias = getattr(layer, f"{name}_bias", None)
        if bias is not None:
            bias.data.copy_(self.random(*bias.shape) - 0.5)
            bias = bias.data.double().clone()
        return found * each[..., None], bias

    def _product(self, weight: tuple[Tensor, Tensor | None], expert: int, x: Tensor) -> Tensor:
        values, bias = weight
        y = values[expert] @ x
        return y if bias is None else y + bias[expert]

    def _activated(self, h: Tensor) -> Tensor:
        """By vLLM's own definitions."""
        from vllm.model_executor.layers import activation as vllm

        limit: Any = self.limits["limit"]
        if self.activation == "silu" and limit is None:
            return vllm.SiluAndMul.forward_native(h)
        if self.activation in ("silu", "swigluoai_uninterleave"):
            alpha, beta = self.limits["alpha"], self.limits["beta"]
            parameters = (alpha or 1.0, beta or 0.0) if self.activation != "silu" else (1.0, 0.0)
            return vllm.SiluAndMulWithClamp(limit, *parameters).forward_native(h)
        if self.activation == "gelu_tanh":
            return vllm.GeluAndMul("tanh").forward_native(h)
        if self.activation == "swigluoai":
            return vllm.SwigluOAIAndMul().forward_native(h)
        functional = {"silu_no_mul": torch.nn.functional.silu, "relu2_no_mul": _relu2}
        return functional[self.activation](h)


def _relu2(h: Tensor) -> Tensor:
    return h.relu().square()


@contextmanager
def _moving(is_on: bool) -> Iterator[None]:
    """A configuration in which experts may move between GPUs."""
    from vllm.config import get_current_vllm_config

    config = get_current_vllm_config().parallel_config
    config.enable_eplb = is_on
    try:
        yield
    finally:
        config.enable_eplb = False


def _config(form: str, own: bool) -> Any:
    """A quantization whose method is nibble's for GPUs, or vLLM's with the plugin's corrections."""
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    from nibble.engine.plugin import cuda, moe

    # In FP4 the plugin's options and the GPU choose.
    chosen = form.endswith("fp4") or not own

    class ModelOpt(ModelOptNvFp4Config):
        FusedMoEMethodCls = moe.ModelOptNvFp4FusedMoE if chosen else cuda.NibbleModelOptNvFp4MoE

    class Compressed(ModelOpt):
        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            use_a16 = not form.endswith("fp4")
            if chosen:
                return moe.CompressedTensorsW4A4Nvfp4MoEMethod(layer.moe_config, prefix, use_a16)
            return cuda.NibbleCompressedTensorsNvFp4MoE(layer.moe_config, prefix, use_a16)

    algorithm = "NVFP4" if form.endswith(("w4a4", "fp4")) else "W4A16_NVFP4"
    made: Any = (Compressed if form.startswith("compressed") else ModelOpt)(
        algorithm, True, None, [], 16
    )
    if "per token" in form:
        made.moe_activation_override = "nvfp4_per_token"
    return made


if __name__ == "__main__":
    main()

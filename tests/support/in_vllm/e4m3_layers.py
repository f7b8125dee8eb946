"""Run as a program: layers of E4M3 experts as vLLM builds them from a quantization config, with
nibble's methods for GPUs, whose operators compute their specification on the CPU. Cases are JSON on
stdin, findings on stdout: the error against float64, or what refuses the case.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.in_vllm.expert_layers import answer, enter_vllm

HIDDEN, INNER, EXPERTS, TOPK, TOKENS = 256, 128, 6, 2, 5


def main() -> None:
    enter_vllm()
    from nibble.engine.plugin import cuda, e4m3

    e4m3.runs_here = cuda.runs_here
    e4m3.install_experts()
    answer(_finding)


def _finding(case: dict[str, Any]) -> float | str:
    from vllm.config import set_current_vllm_config

    from nibble.trials.worker.vllm_layers import config_of

    config = config_of("auto")
    config.additional_config = {"nibble": {"moe_kernel": case.pop("moe_kernel", "nibble")}}
    try:
        with set_current_vllm_config(config), torch.inference_mode():
            return _Case(config, **case).error()
    except (ValueError, NotImplementedError) as error:
        return str(error)


class _Case:
    number = 0

    def __init__(
        self,
        config: Any,
        form: str,
        inner: int = INNER,
        activation: str = "silu",
        damage: str = "",
        eplb: bool = False,
        part: bool = False,
        **layer: Any,
    ) -> None:
        from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

        _Case.number += 1
        config.parallel_config.enable_eplb = eplb
        self.inner, self.damage = inner, damage
        self.generator = torch.Generator().manual_seed(self.number)
        runner = FusedMoEFactory(
            EXPERTS,
            TOPK,
            HIDDEN,
            inner,
            params_dtype=torch.bfloat16,
            quant_config=quantization(form, *_names()),
            prefix=f"model.layers.0.mlp.experts.{self.number}",
            activation=activation,
            enable_eplb=eplb,
            ckpt_names=("gate_proj", "down_proj", "up_proj"),
            **layer,
        )
        self.layer: Any = runner.routed_experts
        if part:  # as the rank of an expert parallel group that has the upper half
            self.layer._expert_map = torch.tensor([-1, -1, -1, 0, 1, 2], dtype=torch.int32)
        self.offset, self.here = (EXPERTS // 2, EXPERTS // 2) if part else (0, EXPERTS)

    def random(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator)

    def error(self) -> float | str:
        method = self.layer.quant_method
        if not type(method).__name__.startswith("Nibble"):
            return f"vLLM's {type(method).__name__}"
        w13, w2 = (self._fill(name) for name in ("w13", "w2"))
        method.process_weights_after_loading(self.layer)
        x = (self.random(TOKENS, HIDDEN) - 0.5).bfloat16()
        ids = torch.argsort(self.random(TOKENS, EXPERTS), dim=-1)[:, :TOPK].int()
        router = self.random(TOKENS, TOPK)
        y: Tensor = method.apply(self.layer, x, router, ids, None, None).double()
        right = torch.zeros_like(y)
        for token in range(TOKENS):
            for place, expert in enumerate(ids[token].tolist()):
                own = expert - self.offset
                if 0 <= own < self.here:
                    gate, up = (w13[own] @ x[token].double()).chunk(2)
                    h = (torch.nn.functional.silu(gate) * up).bfloat16().double()
                    right[token] += router[token, place].double() * (w2[own] @ h)
        return float((y - right).norm() / right.norm())

    def _fill(self, name: str) -> Tensor:
        """Random weights in the layer, their values in float64."""
        from tests.support.kernels.e4m3_cases import e4m3_values

        layer, parts = self.layer, 2 if name == "w13" else 1
        weight = getattr(layer, f"{name}_weight").data
        weight.copy_((self.random(*weight.shape) - 0.5).to(torch.float8_e4m3fn))
        key = "weight_scale_inv" if hasattr(layer, f"{name}_weight_scale_inv") else "weight_scale"
        scale = getattr(layer, f"{name}_{key}").data
        if self.damage != "scale":
            scale.copy_(self.random(*scale.shape) + 0.1)
        if self.damage == "weight":
            weight.view(torch.uint8)[1, 2, 3] = 0x7F
        flat = scale.reshape(len(weight), -1) if scale.ndim == 1 else scale
        return e4m3_values(weight, flat, parts)


def _names() -> tuple[str, ...]:
    """Of this case's layer, as a mixed checkpoint's map may have them."""
    experts = "model.layers.0.mlp.experts"
    return f"{experts}.{_Case.number}", experts


def quantization(form: str, *names: str) -> Any:
    """A config as vLLM reads it from a checkpoint. `names`: of the layers of a mixed one."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.modelopt import (
        ModelOptFp8Config,
        ModelOptMixedPrecisionConfig,
    )

    if form == "modelopt":
        return ModelOptFp8Config("FP8", True, None, [])
    if form == "modelopt channel":
        return ModelOptFp8Config("FP8_PER_CHANNEL_PER_TOKEN", True, None, [])
    if form.startswith("modelopt mixed"):
        algorithm = form.rpartition(" ")[2]
        return ModelOptMixedPrecisionConfig.from_config(
            {
                "quantization": {
                    "quant_algo": "MIXED_PRECISION",
                    "kv_cache_quant_algo": None,
                    "exclude_modules": [],
                    "quantized_layers": {
                        name: {"quant_algo": algorithm, "group_size": 128} for name in names
                    },
                }
            }
        )
    if form.startswith("fp8"):
        blocks = {"fp8": None, "fp8 block": [128, 128], "fp8 block 64": [64, 64]}[form]
        scheme = "static" if form == "fp8" else "dynamic"
        return Fp8Config(True, scheme, [], blocks)
    strategy = form.rpartition(" ")[2]
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    inputs = weights | {"dynamic": strategy != "tensor"}
    weights |= {"strategy": strategy, "dynamic": False}
    if strategy == "block":
        weights |= {"block_structure": [128, 128]}
        inputs |= {"strategy": "group", "group_size": 128}
    else:
        inputs |= {"strategy": "tensor" if strategy == "tensor" else "token"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return CompressedTensorsConfig.from_config(
        {
            "format": "float-quantized",
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": group},
            "ignore": [],
        }
    )


if __name__ == "__main__":
    main()

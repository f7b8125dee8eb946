"""A linear layer of vLLM with an FP8 weight, as a product of a trial. It quantizes activations.

Without nibble's plugin.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nibble.trials.worker.fp8 import Kind, Numbers
from nibble.trials.worker.kernels import Prepared, Refused
from nibble.trials.worker.planted import Product
from nibble.trials.worker.vllm_layers import config_of, copied, enter_world

# ModelOpt's names of the kinds of scales.
ALGORITHMS = {"tensor": "FP8", "channel": "FP8_PER_CHANNEL_PER_TOKEN", "block": "FP8_PB_WO"}
INPUT_SCALE = 8 / 448  # static, with a scale of the whole weight; activations are normal
NAME = "linear"


def vllm_e4m3_layer(weight: Numbers, kind: Kind) -> Prepared:
    """The layer with the kernel of vLLM's choice. Raises Refused where vLLM has none here."""
    device = weight.codes.device
    enter_world(device.type)
    from vllm.config import set_current_vllm_config

    config = config_of("auto")
    with set_current_vllm_config(config):
        layer = _layer(weight, kind)
        kernel: Any = _kernel(layer)
        layer.quant_method.process_weights_after_loading(layer)
        if device.type == "cuda" and (quantize := getattr(kernel, "quant_fp8", None)) is not None:
            # Else torch's operations, which only a compiled graph fuses.
            quantize._forward_method = quantize.forward_cuda

    def product(of: Any) -> Product:
        def call(x: Tensor) -> Tensor:
            with set_current_vllm_config(config):
                return of.quant_method.apply(of, x, None)

        return call

    return Prepared(product(layer), "fp8", type(kernel).__name__, lambda: product(copied(layer)))


def _kernel(layer: Any) -> Any:
    method = layer.quant_method
    return getattr(method, "kernel", None) or getattr(method, "fp8_linear", None)


def _layer(weight: Numbers, kind: Kind) -> Any:
    """A layer as of a ModelOpt checkpoint, before its kernel rearranges the weight."""
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization.modelopt import ModelOptMixedPrecisionConfig

    config = ModelOptMixedPrecisionConfig.from_config(
        {
            "quantization": {
                "quant_algo": "MIXED_PRECISION",
                "kv_cache_quant_algo": None,
                "exclude_modules": [],
                "quantized_layers": {NAME: {"quant_algo": ALGORITHMS[kind], "group_size": 128}},
            }
        }
    )
    rows, columns = weight.codes.shape
    try:
        with torch.device(weight.codes.device):
            layer: Any = ReplicatedLinear(
                columns, rows, bias=False, quant_config=config, prefix=NAME
            )
    except ValueError as error:  # no kernel for this GPU, or columns that it does not take
        raise Refused(" ".join(str(error).split())[:200]) from None
    for name, parameter in layer.named_parameters():
        if name == "input_scale":
            parameter.data.fill_(INPUT_SCALE)
            continue
        value: Tensor = weight.codes if name == "weight" else weight.scales
        parameter.data.copy_(value.reshape(parameter.shape))
    return layer

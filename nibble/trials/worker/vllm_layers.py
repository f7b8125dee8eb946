"""A linear layer of vLLM with one of its NVFP4 kernels, as a product of a trial.

Without nibble's plugin, and with the state that vLLM's layers need in a process.
"""

from __future__ import annotations

import copy
import functools
import os
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from nibble.trials.worker.kernels import INPUT_SCALE, Prepared, Refused
from nibble.trials.worker.planted import Product
from nibble.trials.worker.truth import Weight

WEIGHT_ONLY = "bf16"


def vllm_layer(backend: str, form: str, weight: Weight) -> Prepared:
    """The layer with this --linear-backend ("auto": vLLM's choice) and format of activations.

    Raises Refused where vLLM has no such kernel here.
    """
    device = weight.codes.device
    enter_world(device.type)
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(config_of(backend)):
        layer = _layer(weight, form)
        kernel = getattr(layer.quant_method, "kernel", None)
        ran = type(kernel).__name__ if kernel else "?"
        if backend != "auto" and backend.replace("_", "") not in ran.lower():
            raise Refused(f"vLLM takes {ran} for --linear-backend {backend}")
        layer.quant_method.process_weights_after_loading(layer)

    def product(of: Any) -> Product:
        return lambda x: of.quant_method.apply(of, x, None)

    # Humming, Marlin and other weight-only kernels leave the activations of W4A4 layers in BF16.
    served = form if form == WEIGHT_ONLY or not is_weight_only(ran) else WEIGHT_ONLY
    return Prepared(product(layer), served, ran, lambda: product(copied(layer)))


def is_weight_only(kernel: str) -> bool:
    return any(name in kernel.lower() for name in ("marlin", "humming", "w4a16"))


@functools.cache
def enter_world(device: str) -> None:
    """One rank. Port 0: the store of the group listens on a free port."""
    os.environ |= {"VLLM_PLUGINS": "", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    torch.set_default_dtype(torch.bfloat16)
    if device == "cpu":
        _give_the_cpu_an_emulation()
    with set_current_vllm_config(VllmConfig()):
        backend = "nccl" if device == "cuda" else "gloo"
        init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, backend)
        initialize_model_parallel(1)


def _give_the_cpu_an_emulation() -> None:
    """vLLM 0.32 has no NVFP4 kernel for the CPU; its emulation runs there."""
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    linear.register_linear_kernel(linear.EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")


@functools.cache
def config_of(backend: str) -> Any:
    from vllm.config import KernelConfig, VllmConfig

    flags: dict[str, Any] = {"linear_backend": backend}
    return VllmConfig(kernel_config=KernelConfig(**flags))


def _layer(weight: Weight, form: str) -> Any:
    """A layer as of a ModelOpt checkpoint, before its kernel rearranges the weight."""
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    algorithm = "W4A16_NVFP4" if form == WEIGHT_ONLY else "NVFP4"
    config = ModelOptNvFp4Config(algorithm, True, None, [], 16)
    rows, columns = weight.shape
    try:
        with torch.device(weight.codes.device):
            layer = ReplicatedLinear(
                columns, rows, bias=False, quant_config=config, prefix="linear"
            )
    except ValueError as error:  # no kernel for this GPU, or none for weights alone
        raise Refused(" ".join(str(error).split())[:200]) from None
    stored: dict[str, Tensor | float] = {
        "weight": weight.codes,
        "weight_scale": weight.scales,
        "weight_scale_2": weight.global_scale,
        "input_scale": INPUT_SCALE,
    }
    for name, parameter in layer.named_parameters():
        value = stored[name]
        if isinstance(value, Tensor):
            parameter.data.copy_(value)
        else:
            parameter.data.fill_(value)
    return layer


def copied(layer: Any) -> Any:
    """The layer with copies of its large tensors. It shares its method, which holds no weight."""
    again = copy.copy(layer)
    again._parameters = {
        name: None if value is None else Parameter(value.data.clone(), requires_grad=False)
        for name, value in layer._parameters.items()
    }
    again._buffers = {
        name: None if value is None else value.clone() for name, value in layer._buffers.items()
    }
    return again

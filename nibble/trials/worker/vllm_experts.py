"""A layer of experts of vLLM with the kernel that it chooses for NVFP4, as a call of a trial.

Without nibble's plugin. The router is not part of it: calls have weights and ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nibble.engine.contract import FP4_PRODUCTS
from nibble.trials.trial import shape_name
from nibble.trials.worker.kernels import INPUT_SCALE, Refused
from nibble.trials.worker.truth import GLOBAL_SCALE
from nibble.trials.worker.vllm_layers import config_of, enter_world, is_weight_only

if TYPE_CHECKING:
    from nibble.trials.worker.experts import Layer

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def vllm_experts(form: str, given: Layer) -> tuple[Call, str, str]:
    """The layer with this format of activations, the name of vLLM's kernel and the format that this
    kernel multiplies. Gives all experts one input scale: some of vLLM's kernels have the largest.

    Raises Refused where vLLM has no such kernel, one that routes too, or one that nibble has no
    counterpart of.
    """
    device = given.codes[0].device
    enter_world(device.type)
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker import workspace

    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(device)
    config = config_of("auto")
    with set_current_vllm_config(config):
        layer = _layer(form, given)
        method = layer.quant_method
        if method.is_monolithic:
            raise Refused("vLLM's kernel for these experts routes too, and does not run alone")
        method.process_weights_after_loading(layer)
    ran = _name(method)
    served = "bf16" if is_weight_only(ran) else form
    if served != "bf16" and not _compares_in_fp4(device):
        raise Refused(f"{ran} quantizes the activations, which nibble's kernel leaves in BF16")
    given.input_scales = [torch.full_like(each, INPUT_SCALE) for each in given.input_scales]
    dtype = method.topk_indices_dtype or torch.int32

    def call(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        with set_current_vllm_config(config):
            return method.apply(layer, x, weights, ids.to(dtype), None, None)

    return call, ran, served


def _compares_in_fp4(device: torch.device) -> bool:
    """Whether nibble's experts multiply FP4 activations there, too: on SM12x."""
    return device.type == "cuda" and (torch.cuda.get_device_capability(device)[0] == FP4_PRODUCTS)


def _name(method: Any) -> str:
    backend = getattr(method, "nvfp4_backend", None)
    return str(getattr(backend, "value", "")) or type(method).__name__


def _layer(form: str, given: Layer) -> Any:
    """The experts of a ModelOpt checkpoint, before their kernel rearranges the weights."""
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    algorithm = "W4A16_NVFP4" if form == "bf16" else "NVFP4"
    config = ModelOptNvFp4Config(algorithm, True, None, [], 16)
    try:
        with torch.device(given.codes[0].device):
            runner = FusedMoEFactory(
                given.experts,
                given.topk,
                given.hidden,
                given.inner,
                params_dtype=torch.bfloat16,
                quant_config=config,
                prefix=f"experts.{shape_name(given.shape)}.{form}",
                activation=given.activation,
                ckpt_names=("gate_proj", "down_proj", "up_proj" if given.gated else None),
            )
    except (ValueError, NotImplementedError) as error:  # no kernel for this GPU
        raise Refused(" ".join(str(error).split())[:200]) from None
    layer = runner.routed_experts
    for which, name in enumerate(("w13", "w2")):
        getattr(layer, f"{name}_weight").data.copy_(given.codes[which])
        getattr(layer, f"{name}_weight_scale").data.copy_(given.scales[which])
        getattr(layer, f"{name}_weight_scale_2").data.fill_(GLOBAL_SCALE)
        getattr(layer, f"{name}_input_scale").data.fill_(INPUT_SCALE)
    return layer
